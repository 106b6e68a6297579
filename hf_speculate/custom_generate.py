"""`generate` for the file `custom_generate/generate.py` in a head's repository: that head is the speculator.

Such files are never updated, so this module keeps its name, and `generate` its arguments.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from .errors import SpeculateError, UnsupportedRequestError
from .speculator import local_folder


_HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only")


def generate(model: Any, **arguments: Any) -> Any:
    """`model.generate(**arguments)` with the head whose folder or repository was given as `custom_generate=`.

    Args:
        model: the target, whose `generate` was called.
        arguments: other arguments of that call. `revision`, `token`, `cache_dir` and `local_files_only` apply to the
            head's weights as they did to its code.

    Raises:
        SpeculateError: see `generate(speculator=...)`; or no `generate(custom_generate=...)` called this.
    """
    if "speculator" in arguments:  # not checked yet if the package was not imported before
        raise UnsupportedRequestError(
            "speculator= and custom_generate= both replace the decoding loop: give one of them."
        )
    head = _asked_for()
    where = {name: arguments.pop(name) for name in _HUB_ARGUMENTS if name in arguments}
    if os.path.isdir(head):
        head = os.path.abspath(head)  # a folder may have the name of a drafter
    elif where:
        head = local_folder(head, **where)
    return model.generate(**arguments, speculator=head)


def _asked_for() -> str:
    """The `custom_generate` argument of the running `generate`.

    transformers passes on all arguments but this one. It has also copied the calling file to a cache, which does not
    lead back to a local folder.
    """
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
