"""A `generate` call from end to end: the bridge that takes it over from transformers, checks it and prepares the loop.

The bridge wraps three methods of `GenerationMixin`. What is decided once a request belongs here; `hf_speculate.loop`
runs its rounds.
"""

from .bridge import install as install
from .bridge import uninstall as uninstall
from .streaming import rounds as rounds
from .streaming import stream as stream
from .trial import check_drafting as check_drafting
