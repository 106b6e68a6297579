"""`main`, which the script `hf-speculate` calls: the overview and the version at once, every command by the app.

The app reads options and prints help without torch. For that it needs a few modules of the engine: errors, names,
files. `import hf_speculate` imports torch and transformers, because it patches `generate` at once. So these modules are
imported before their packages. A package that is imported later finds them in `sys.modules`, and runs as always.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec, module_from_spec

from .endings import INTERRUPTED, MISUSED, drop_stdout
from .overview import overview, version_line


# Modules of heavy packages that import nothing heavy themselves.
_LIGHT = (
    "hf_speculate.errors",
    "hf_speculate.files",
    "hf_speculate.messages",
    "hf_speculate.speculator.registry",
    "hf_speculate_gguf.named",
)


def main() -> None:
    """Runs the command line in `sys.argv`."""
    first = sys.argv[1] if len(sys.argv) > 1 else None
    if first in ("-h", "--help"):
        _print(overview())
    elif first == "--version":
        _print(version_line())
    elif first is None:
        _print(overview())
        raise SystemExit(MISUSED)
    else:
        _run_command()


def import_light() -> None:
    """Imports the light modules without the `__init__` of their packages. Packages that are there already stay."""
    parents = dict.fromkeys(parent for name in _LIGHT for parent in _parents(name))
    missing = [name for name in parents if name not in sys.modules]
    try:
        for name in missing:
            spec = find_spec(name)
            assert spec is not None
            sys.modules[name] = module_from_spec(spec)  # has the path of the package, and is not executed
        for name in _LIGHT:
            import_module(name)
    finally:
        for name in missing:
            sys.modules.pop(name, None)


def _parents(name: str) -> Iterable[str]:
    """Packages that hold a module, the outermost first."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def _run_command() -> None:
    try:
        import_light()
        from .cli import app
    except KeyboardInterrupt:
        sys.stderr.write("hf-speculate: interrupted.\n")
        raise SystemExit(INTERRUPTED) from None
    app(prog_name="hf-speculate")


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        drop_stdout()
        if error.errno != errno.EPIPE:  # a reader that has gone needs no message
            sys.stderr.write(f"hf-speculate: error: cannot write to stdout: {error.strerror}\n")
        raise SystemExit(1) from None
