"""A package is entered by its face: code outside of it imports from the package, never from its modules.

Packages are found in the checkout, so a new one is checked without a line here. Late imports and imports for type
checking count. A house (`hf_speculate`, `hf_speculate_tools`, ...) holds packages and single modules, which anyone may
import.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from ..support.paths import REPOSITORY


SOURCES = (REPOSITORY, REPOSITORY / "plugins", REPOSITORY / "training")
# Houses that are a package themselves: their modules are entered by the face, too.
CLOSED_HOUSES = ("hf_speculate_gguf",)
# What may be imported past a face: by whom ("*": by all), which module, and why.
EXCEPTIONS = {
    ("*", "hf_speculate.compatibility.stock"): "imports transformers; the face must work where that is too old",
    ("*", "hf_speculate.speculator.registry"): "the command line looks up names without torch, which the face imports",
    ("*", "hf_speculate_gguf.named"): "the command line looks up names without torch, which the face imports",
    ("hf_speculate_training.__main__", "hf_speculate_training.run.arguments"): "the command, as `python -m` starts it",
    ("hf_speculate_training.__main__", "hf_speculate_training.run.command"): "the command, as `python -m` starts it",
}


def find_modules(sources: Iterable[Path]) -> dict[str, Path]:
    """Dotted name -> file of every module in the houses that lie in the source folders."""
    return {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path
        for source in sources
        for house in sorted(source.glob("hf_speculate*/__init__.py"))
        for path in sorted(house.parent.rglob("*.py"))
    }


def find_imports(name: str, modules: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every module that a module imports, wherever in it."""
    path = modules[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                is_module = f"{base}.{alias.name}" in modules and alias.name not in find_exports(modules[base])
                yield node.lineno, f"{base}.{alias.name}" if is_module else base


def find_exports(face: Path) -> set[str]:
    """Names that an `__init__` takes from its modules. A function may have the name of its module."""
    return {
        alias.asname or alias.name
        for node in ast.parse(face.read_bytes(), str(face)).body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def find_face(importer: str, imported: str, modules: dict[str, Path]) -> str:
    """The package past whose face a module imports another one; "" if it may."""
    parts = imported.split(".")
    packages = [".".join(parts[: end + 1]) for end in range(len(parts) - 1)]
    for package in packages[1:]:
        if not f"{importer}.".startswith(f"{package}."):
            return package
    if packages and packages[0] in CLOSED_HOUSES and importer.partition(".")[0] != packages[0]:
        is_module = len(parts) == 2 and modules[imported].name != "__init__.py"
        return packages[0] if is_module else ""
    return ""


def find_trespassers(sources: Iterable[Path]) -> dict[tuple[str, str], str]:
    """(Importer, imported module) -> a sentence about it, of every import past a face."""
    modules = find_modules(sources)
    return {
        (importer, imported): f"{importer}, line {line}: imports {imported}; import from {face}"
        for importer in modules
        for line, imported in find_imports(importer, modules)
        if imported in modules
        for face in [find_face(importer, imported, modules)]
        if face
    }


@pytest.fixture(scope="module")
def trespassers():
    return find_trespassers(SOURCES)


def test_packages_are_entered_by_their_faces(trespassers):
    unexcused = [
        sentence
        for (importer, imported), sentence in trespassers.items()
        if not {(importer, imported), ("*", imported)} & EXCEPTIONS.keys()
    ]
    assert not unexcused


def test_every_exception_is_used(trespassers):
    used = {*trespassers, *(("*", imported) for _, imported in trespassers)}
    assert used >= EXCEPTIONS.keys()


@pytest.fixture
def toy(tmp_path):
    """A source folder with two houses, and a function that adds a module to them."""

    def add(name: str, text: str = "") -> None:
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    for name in ("__init__", "errors", "loop/rounds", "loop/steps/__init__", "loop/steps/step", "loop/walk"):
        add(f"hf_speculate/{name}")
    add("hf_speculate/loop/__init__", "from . import rounds as rounds\nfrom .walk import walk as walk")
    for name in ("__init__", "reading", "native/__init__", "native/kernel"):
        add(f"hf_speculate_gguf/{name}")
    return add


@pytest.mark.parametrize(
    ("module", "statement", "face"),
    [
        ("hf_speculate/errors", "from .loop.rounds import run", "hf_speculate.loop"),
        ("hf_speculate/errors", "from .loop import rounds", "hf_speculate.loop"),
        ("hf_speculate/errors", "from hf_speculate.loop.rounds import run", "hf_speculate.loop"),
        ("hf_speculate/errors", "import hf_speculate.loop.rounds", "hf_speculate.loop"),
        ("hf_speculate/errors", "def late():\n    from .loop.rounds import run", "hf_speculate.loop"),
        ("hf_speculate/errors", "if TYPE_CHECKING:\n    from .loop.rounds import run", "hf_speculate.loop"),
        ("hf_speculate/errors", "from .loop.steps import walk", "hf_speculate.loop"),
        ("hf_speculate/__init__", "from .loop.rounds import run", "hf_speculate.loop"),
        ("hf_speculate/errors", "from .loop import run", ""),
        ("hf_speculate/errors", "from .loop import walk", ""),
        ("hf_speculate/cache/__init__", "from ..loop.rounds import run", "hf_speculate.loop"),
        ("hf_speculate/cache/layers", "from .. import errors, loop", ""),
        ("hf_speculate/loop/loop", "from .rounds import run", ""),
        ("hf_speculate/loop/loop", "from .steps import walk", ""),
        ("hf_speculate/loop/loop", "from .steps.step import walk", "hf_speculate.loop.steps"),
        ("hf_speculate/loop/steps/walk", "from ..rounds import run", ""),
        ("hf_speculate_tools/__init__", "from hf_speculate.errors import SpeculateError", ""),
        ("hf_speculate_tools/__init__", "from hf_speculate_gguf.reading import read", "hf_speculate_gguf"),
        ("hf_speculate_tools/__init__", "from hf_speculate_gguf.native import has_kernel", ""),
        ("hf_speculate_tools/__init__", "from hf_speculate_gguf.native.kernel import run", "hf_speculate_gguf.native"),
        ("hf_speculate_gguf/loading", "from .reading import read", ""),
    ],
)
def test_find_trespassers_names_the_face_that_was_passed(toy, tmp_path, module, statement, face):
    toy(module, f"import torch\n{statement}\n")
    (*sentences,) = find_trespassers([tmp_path]).values()
    assert [sentence.rpartition("import from ")[2] for sentence in sentences] == ([face] if face else [])
