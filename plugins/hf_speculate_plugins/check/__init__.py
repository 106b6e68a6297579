"""A search for what makes a head accept too little, on text that the target itself wrote.

Published heads are often labelled wrongly: the layers that they read are off by one, a norm is on the wrong side, RoPE
has another base. Such a head loads, drafts badly, and shows no error. A method brings a `Reader` of its heads. This
room writes the texts, tries other conventions (`search`) and other conditions (`conditions`), and says what helps.
"""

from .acceptance import AcceptanceRates as AcceptanceRates
from .acceptance import Alternative as Alternative
from .acceptance import ConventionReader as ConventionReader
from .acceptance import Options as Options
from .acceptance import Reader as Reader
from .acceptance import Text as Text
from .acceptance import accepted_lengths as accepted_lengths
from .acceptance import write_texts as write_texts
from .calibrating import measure_calibration as measure_calibration
from .conditions import Finding as Finding
from .conditions import Measured as Measured
from .conditions import Use as Use
from .conditions import compare as compare
from .conditions import find_conditions as find_conditions
from .search import HeadCheck as HeadCheck
from .search import Trial as Trial
from .search import check_head as check_head
