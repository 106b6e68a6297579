"""Packages and distributions: their files, their imports, their entry points."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import hf_speculate

from ..support.paths import REPOSITORY, TESTS
from ..support.tiers import QUICK, REST


PACKAGES = {
    "hf_speculate": REPOSITORY / "hf_speculate",
    "hf_speculate_gguf": REPOSITORY / "plugins" / "hf_speculate_gguf",
    "hf_speculate_plugins": REPOSITORY / "plugins" / "hf_speculate_plugins",
    "hf_speculate_tools": REPOSITORY / "plugins" / "hf_speculate_tools",
    "hf_speculate_training": REPOSITORY / "training" / "hf_speculate_training",
}
MAX_LINES = 400
# Not one of the other houses, and nothing heavy that only they want.
NOT_IN_CORE = (
    "hf_speculate_gguf",
    "hf_speculate_plugins",
    "hf_speculate_tools",
    "hf_speculate_training",
    "datasets",
    "peft",
    "matplotlib",
    "typer",
)


@pytest.fixture(scope="module")
def project():
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


# All that `import hf_speculate` may load in addition to what `generate` is made of. None takes 5 ms.
LIGHT = {"hf_speculate", "html", "jaxtyping", "numpy"}
LIGHT_PARTS = {"transformers.generation.streamers", "transformers.integrations.sdpa_attention"}


def loaded_by(*imports: str) -> list[set[str]]:
    """Names of the modules that a fresh interpreter has loaded after each of these import statements."""
    code = "import sys\n" + "".join(f"{statement}\nprint(*sys.modules)\n" for statement in imports)
    result = subprocess.run(
        [sys.executable, "-c", code], cwd="/", check=True, capture_output=True, text=True, timeout=120
    )
    return [set(line.split()) for line in result.stdout.splitlines()]


def test_the_distribution_ships_our_packages_and_nothing_else(project):
    shipped = {path.parts[0] for path in importlib.metadata.files("hf-speculate")}
    own = {name for name in shipped if not name.endswith((".dist-info", ".pth")) and name != ".."}
    assert own <= set(PACKAGES), f"unexpected top-level names: {sorted(own - set(PACKAGES))}"
    declared = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {REPOSITORY / folder for folder in declared} == set(PACKAGES.values())


def test_installed_entry_points_are_those_of_pyproject(project):
    installed = importlib.metadata.distribution("hf-speculate").entry_points
    tables = {"console_scripts": project["project"]["scripts"], **project["project"]["entry-points"]}
    for group, declared in tables.items():
        found = {point.name: point.value for point in installed.select(group=group)}
        assert found == declared, f"the installed {group} are stale: run `pip install -e .` again"


def test_the_core_imports_no_drafting_method_no_trainer_and_nothing_heavy_of_transformers():
    stock, core, testing = loaded_by(
        "from transformers import GenerationMixin", "import hf_speculate", "import hf_speculate.testing"
    )
    parts = {name for name in core - stock if name.startswith("transformers.")}
    assert parts <= LIGHT_PARTS, "models are loaded later, by who has one"
    assert {name.partition(".")[0] for name in core - stock - parts} <= LIGHT
    assert not {name.partition(".")[0] for name in testing} & set(NOT_IN_CORE)


@pytest.mark.parametrize("name", PACKAGES)
def test_every_package_says_that_it_is_typed(name):
    assert (PACKAGES[name] / "py.typed").is_file()


def test_there_is_no_other_package():
    found = {path.parent for path in REPOSITORY.glob("*/hf_speculate*/__init__.py")}
    found |= {path.parent for path in REPOSITORY.glob("hf_speculate*/__init__.py")}
    assert found == set(PACKAGES.values())


def test_no_module_is_longer_than_can_be_read_in_one_go():
    sources = [path for folder in PACKAGES.values() for path in folder.rglob("*.py")]
    lengths = {str(path.relative_to(REPOSITORY)): len(path.read_text().splitlines()) for path in sources}
    too_long = {path: length for path, length in lengths.items() if length > MAX_LINES}
    assert not too_long, f"over {MAX_LINES} lines: {too_long}"


def imported_test_modules(source: str) -> Iterator[str]:
    """Test modules that the import statements of a module name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.rpartition(".")[2].startswith("test_"))


class TestTests:
    def test_no_module_imports_a_test_module(self):
        found = {
            str(path.relative_to(TESTS)): list(imported_test_modules(path.read_text())) for path in TESTS.rglob("*.py")
        }
        assert not {path: names for path, names in found.items() if names}, "what is shared belongs in tests/support"

    @pytest.mark.parametrize(
        "statement",
        ["from .test_a import b", "from ..room.test_a import b", "from . import test_a", "import tests.room.test_a"],
    )
    def test_imported_test_modules_finds_every_form_of_import(self, statement):
        assert list(imported_test_modules(statement))

    def test_readme_names_every_file_of_support(self):
        named = re.findall(r"^\| `(\w+\.py)`", (TESTS / "README.md").read_text(), re.MULTILINE)
        assert named == sorted(path.name for path in (TESTS / "support").glob("*.py"))

    @pytest.mark.parametrize("pattern", [*REST, *QUICK])
    def test_tier_patterns_match_files(self, pattern):
        assert any(fnmatchcase(path.relative_to(TESTS).as_posix(), pattern) for path in TESTS.rglob("test_*.py"))


# Files without which a package does not work.
NEEDED = (
    "hf_speculate_gguf/native/kernel/kernel.cpp",
    "hf_speculate_gguf/native/kernel/layer.h",
    "hf_speculate/request/tried_classes.json",
    "hf_speculate_tools/commands/chat_prompts.jsonl",
    "hf_speculate_tools/commands/python_prompts.jsonl",
)
MAX_SDIST = 8 << 20


def included(builder) -> dict[str, str]:
    """Path in the distribution -> path in the checkout."""
    files = builder(str(REPOSITORY)).recurse_included_files()
    return {file.distribution_path.replace("\\", "/"): file.path for file in files}


@pytest.fixture(scope="module")
def tracked():
    run = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if run.returncode:
        pytest.skip("not a checkout of git")
    return run.stdout.split()


@pytest.fixture(scope="module")
def wheel():
    return included(WheelBuilder)


@pytest.fixture(scope="module")
def sdist():
    return included(SdistBuilder)


def test_the_wheel_has_every_file_of_the_packages(wheel, tracked):
    roots = tuple(f"{folder.relative_to(REPOSITORY).as_posix()}/" for folder in PACKAGES.values())
    wanted = {re.sub(r"^(plugins|training)/", "", path) for path in tracked if path.startswith(roots)}
    assert wanted <= wheel.keys(), f"missing: {sorted(wanted - wheel.keys())}"
    assert {f"{package}/py.typed" for package in PACKAGES} | set(NEEDED) <= wheel.keys()


def test_the_map_of_the_kernel_names_every_source_once():
    folder = PACKAGES["hf_speculate_gguf"] / "native" / "kernel"
    rows = re.findall(r"^\| (`.*?) \|", (folder / "README.md").read_text().partition("\n## ")[0], re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+\.\w+)`", row)]
    assert sorted(named) == sorted(path.name for path in folder.iterdir() if path.suffix in (".h", ".cpp"))


def test_the_source_distribution_has_what_the_wheel_is_built_from(wheel, sdist):
    sources = set(sdist.values())
    missing = sorted(name for name, path in wheel.items() if path not in sources)
    assert not missing
    assert {"CHANGELOG.md", "CONTRIBUTING.md", "Makefile", ".ci/run"} <= sdist.keys()


def test_the_source_distribution_has_the_tests_and_recipes_but_no_weights(sdist, tracked):
    wanted = {path for path in tracked if path.startswith(("tests/", "training/recipes/", "docs/"))}
    assert wanted <= sdist.keys(), f"missing: {sorted(wanted - sdist.keys())}"
    assert not [name for name in sdist if name.endswith((".safetensors", ".gguf", ".bin"))]
    assert sum((REPOSITORY / path).stat().st_size for path in sdist.values()) < MAX_SDIST


def test_both_versions_are_the_same_and_the_changelog_is_open():
    project = (REPOSITORY / "pyproject.toml").read_text()
    assert f'\nversion = "{hf_speculate.__version__}"\n' in project
    headings = re.findall(r"^## (.*)$", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased" or headings[0].startswith(hf_speculate.__version__)
