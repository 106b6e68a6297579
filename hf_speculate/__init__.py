"""Speculative decoding as a plug-in for transformers: `model.generate(..., speculator=...)`."""

from typing import TYPE_CHECKING, Any

from .compatibility import check_version, explained


check_version()

try:
    # Bound here, because the command line imports these three before the package (`hf_speculate_tools.front`).
    from . import errors as errors
    from . import files as files
    from . import messages as messages
    from .drafting import Drafter as Drafter
    from .drafting import DraftRequest as DraftRequest
    from .drafting import DraftSession as DraftSession
    from .drafting import DraftState as DraftState
    from .errors import SpeculateError as SpeculateError
    from .messages import install_handler
    from .request import install as install
    from .request import rounds as rounds
    from .request import stream as stream
    from .request import uninstall as uninstall
    from .speculator import AutoSpeculator as AutoSpeculator
    from .speculator import Speculator as Speculator
    from .speculator import attach as attach
    from .speculator import attached as attached
    from .speculator import detach as detach
    from .speculator import installed_drafters as installed_drafters
    from .speculator import speculators as speculators
    from .stats import SpeculationStats as SpeculationStats
    from .tree import DraftTree as DraftTree
    from .tree import Round as Round
except (ImportError, AttributeError) as error:
    raise explained(error) from None


if TYPE_CHECKING:
    from hf_speculate_gguf import load_gguf as load_gguf
    from hf_speculate_plugins.mtp import save_pretrained as save_pretrained


__version__ = "0.1.0"

install_handler()
install()


def __getattr__(name: str) -> Any:
    """Names of packages above this one, imported when they are asked for: nothing else needs what these import."""
    if name == "load_gguf":
        from hf_speculate_gguf import load_gguf

        return load_gguf
    if name == "save_pretrained":
        from hf_speculate_plugins.mtp import save_pretrained

        return save_pretrained
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), "load_gguf", "save_pretrained"])
