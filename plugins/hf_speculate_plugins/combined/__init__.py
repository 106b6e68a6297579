"""Several drafters in one tree: `speculator="examples/pycoder-eagle3+prompt_lookup"`."""

from .drafter import CombinedDrafter as CombinedDrafter
from .drafter import CombinedOptions as CombinedOptions
