"""What `custom_generate/generate.py` in the repository of a head calls: `generate` with that head as the speculator.

Such files are in repositories that nobody mends any more: this module keeps its name, and `generate` its arguments.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from .errors import SpeculateError, UnsupportedRequestError
from .hub import local_folder


_HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only")


def generate(model: Any, **arguments: Any) -> Any:
    """`model.generate(**arguments)` with the head whose folder or repository was given as `custom_generate=`.

    Args:
        model: the target, which is what `generate` was called on.
        arguments: all others of that call; those that say where a repository is had from (`revision`, `token`,
            `cache_dir`, `local_files_only`) hold for the head's weights as they did for its code.
    Raises:
        SpeculateError: as `generate(speculator=...)`; or there is no `generate(custom_generate=...)` that called this.
    """
    if "speculator" in arguments:  # before the package was imported, nobody had looked at it
        raise UnsupportedRequestError(
            "speculator= and custom_generate= both replace the decoding loop: give one of them."
        )
    head = _asked_for()
    where = {name: arguments.pop(name) for name in _HUB_ARGUMENTS if name in arguments}
    if os.path.isdir(head):
        head = os.path.abspath(head)  # a folder may be called as a drafter is
    elif where:
        head = local_folder(head, **where)
    return model.generate(**arguments, speculator=head)


def _asked_for() -> str:
    """`custom_generate` of the `generate` that is running. transformers hands over all arguments but this one, and has
    copied the file that called us to a cache, from where no way leads back to a local folder."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_globals.get("__name__") == "transformers.generation.utils":
            asked = frame.f_locals.get("custom_generate")
            if isinstance(asked, str):
                return asked
        frame = frame.f_back
    raise SpeculateError(
        "the code of a head's custom_generate folder was called by something else than "
        "model.generate(..., custom_generate=...), and cannot know where the head is: give its folder or Hub id, "
        "model.generate(..., speculator=...)."
    )
