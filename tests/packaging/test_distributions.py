"""What `make build` puts into the wheel and the source distribution."""

from __future__ import annotations

import re
import subprocess

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import hf_speculate

from ..support.paths import REPOSITORY


PACKAGES = {"hf_speculate": "", "hf_speculate_plugins": "plugins/", "hf_speculate_training": "training/"}
# What a file without a package around it is there for.
NEEDED = (
    "hf_speculate/gguf/kernel/kernel.cpp",
    "hf_speculate/gguf/kernel/layer.h",
    "hf_speculate/generation/tried_classes.json",
    "hf_speculate/commands/chat_prompts.jsonl",
    "hf_speculate/commands/python_prompts.jsonl",
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
    roots = tuple(f"{folder}{package}/" for package, folder in PACKAGES.items())
    wanted = {re.sub(r"^(plugins|training)/", "", path) for path in tracked if path.startswith(roots)}
    assert wanted <= wheel.keys(), f"missing: {sorted(wanted - wheel.keys())}"
    assert {f"{package}/py.typed" for package in PACKAGES} | set(NEEDED) <= wheel.keys()


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
