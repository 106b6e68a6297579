"""Is a head read as it was trained? Acceptance on the target's own text, as stated and under other conventions.

Published heads are often mis-labelled: the layers that they read are off by one, a norm is on the wrong side, RoPE has
another base. Such a head loads and drafts badly, with nothing to see. A method brings a `Reader` of its heads; this
room writes the texts, tries the alternatives and says what helps; and it says which conditions (prompts, templates,
adapters, quantisation, dtype, context) acceptance depends on.
"""

from .checking import Alternative, HeadCheck, Options, Reader, Trial, check_head
from .conditions import Finding, Measured, compare_conditions, compare_context, compare_sets
from .rates import AcceptanceRates
from .readers import ConventionReader
from .texts import Text, accepted_lengths, write_texts
from .values import measure_calibration


__all__ = [
    "AcceptanceRates",
    "Alternative",
    "ConventionReader",
    "Finding",
    "HeadCheck",
    "Measured",
    "Options",
    "Reader",
    "Text",
    "Trial",
    "accepted_lengths",
    "check_head",
    "compare_conditions",
    "compare_context",
    "compare_sets",
    "measure_calibration",
    "write_texts",
]
