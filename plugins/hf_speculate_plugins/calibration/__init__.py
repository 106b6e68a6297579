"""Is a head read as it was trained? Acceptance on the target's own text, as stated and under other conventions.

Published heads are often mis-labelled, load, and draft badly with nothing to see. A method brings a `Reader` of its
heads; this room writes the texts, tries the alternatives and says what helps.
"""

from .checking import Acceptance, HeadCheck, Trial, write_texts


__all__ = ["Acceptance", "HeadCheck", "Trial", "write_texts"]
