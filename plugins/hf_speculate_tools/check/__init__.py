"""A search for what makes a head accept too little, on text that the target itself wrote.

Published heads are often labelled wrongly: the layers that they read are off by one, a norm is on the wrong side, RoPE
has another base. Such a head loads, drafts badly, and shows no error. This package lets the head read such texts, tries
other conventions (`conventions`, `search`), another chat template and long contexts (`conditions`), and reports what
helps.
"""

from .acceptance import AcceptanceRates as AcceptanceRates
from .acceptance import write_texts as write_texts
from .calibrating import measure_calibration as measure_calibration
from .calibrating import writable_folder as writable_folder
from .calibrating import write_calibration as write_calibration
from .conditions import has_other_template as has_other_template
from .conditions import other_forms as other_forms
from .search import HeadCheck as HeadCheck
from .search import check_head as check_head
