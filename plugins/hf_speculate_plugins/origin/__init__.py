"""The origin of a head: what its folder records of its training, and whether the given target is the one it was for.

provenance     `provenance.json`, as the trainer writes it
targets        the recorded target and the given one, compared
weights        samples of weights, by which a target is recognised
"""

from .provenance import PROVENANCE_FILE as PROVENANCE_FILE
from .provenance import read_provenance as read_provenance
from .targets import check_head_vocabulary as check_head_vocabulary
from .targets import check_origin as check_origin
from .targets import check_stated_name as check_stated_name
from .targets import describe_identity as describe_identity
from .targets import head_record as head_record
from .weights import compare_weights as compare_weights
from .weights import sample_weights as sample_weights
