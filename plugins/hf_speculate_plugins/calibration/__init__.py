"""Is a head read as it was trained? Acceptance on the target's own text, as stated and under other conventions.

Published heads are often mis-labelled: the layers that they read are off by one, a norm is on the wrong side, RoPE has
another base. Such a head loads and drafts badly, with nothing to see. A method brings a `Reader` of its heads; this
room writes the texts, tries the alternatives and says what helps.
"""

from .checking import Alternative, HeadCheck, Options, Reader, Trial, check_head
from .rates import AcceptanceRates
from .texts import Text, accepted_lengths, write_texts


__all__ = [
    "AcceptanceRates",
    "Alternative",
    "HeadCheck",
    "Options",
    "Reader",
    "Text",
    "Trial",
    "accepted_lengths",
    "check_head",
    "write_texts",
]
