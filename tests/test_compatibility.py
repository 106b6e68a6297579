"""Transformers that are too old, absent, or lack what is imported: one sentence with the versions that work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hf_speculate.compatibility import WORKING, check_feature, check_version, explained, too_old, versions
from hf_speculate.compatibility.versions import OLDEST
from hf_speculate.errors import IncompatibleTransformersError, SpeculateError

from .support.paths import REPOSITORY


def last_line_of_a_failing_import(*before: str, **environment: str) -> str:
    """The last line on stderr of a fresh interpreter."""
    code = "\n".join((*before, "import hf_speculate"))
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, cwd="/", capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 1, run.stdout
    assert "direct cause" not in run.stderr
    assert "During handling" not in run.stderr
    return run.stderr.splitlines()[-1]


@pytest.fixture
def installed(monkeypatch):
    """Pretends that this version is installed."""
    return lambda version: monkeypatch.setattr(versions, "installed_version", lambda: version)


def test_the_versions_are_those_of_pyproject():
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert f"transformers{WORKING}" in project["dependencies"]
    assert WORKING.startswith(f">={OLDEST},")


class TestVersion:
    @pytest.mark.parametrize("version", ["4.57.3", "5.4.0", "5.5.0.dev0", None])
    def test_older_ones_and_none_are_refused(self, installed, version):
        installed(version)
        with pytest.raises(IncompatibleTransformersError) as caught:
            check_version()
        assert f"transformers {WORKING}, but {version or 'none'} is installed: pip install" in str(caught.value)
        assert isinstance(caught.value, SpeculateError)
        assert isinstance(caught.value, ImportError)

    @pytest.mark.parametrize("version", ["5.5.0", "5.5.1.dev0", "5.24.0", "6.0.0"])
    def test_newer_ones_are_judged_by_what_is_in_them(self, installed, version):
        installed(version)
        check_version()

    def test_old_transformers_is_refused_before_its_import(self, tmp_path):
        (tmp_path / "transformers").mkdir()
        (tmp_path / "transformers" / "__init__.py").write_text("raise SystemExit('was imported')\n")
        metadata = tmp_path / "transformers-4.57.3.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.3\n")
        said = last_line_of_a_failing_import(PYTHONPATH=str(tmp_path))
        assert "IncompatibleTransformersError: hf_speculate works with" in said
        assert "but 4.57.3 is installed" in said


class TestFeatures:
    def test_what_an_old_version_lacks_is_named_with_the_version_that_has_it(self, installed):
        installed("5.17.0")
        with pytest.raises(IncompatibleTransformersError) as caught:
            check_feature("a model in a GGUF file", "5.18")
        assert str(caught.value) == (
            "a model in a GGUF file needs transformers >= 5.18, but 5.17.0 is installed: pip install "
            "'transformers>=5.18,<6'"
        )

    @pytest.mark.parametrize("version", ["5.18.0", "5.24.0", "6.0.0"])
    def test_newer_ones_have_it(self, installed, version):
        installed(version)
        assert not too_old("a model in a GGUF file", "5.18")


class TestMissingParts:
    @pytest.mark.rest
    def test_import_names_the_missing_part_of_transformers(self):
        said = last_line_of_a_failing_import(
            "import transformers.cache_utils", "del transformers.cache_utils.DynamicLayer"
        )
        assert "IncompatibleTransformersError" in said
        assert "does not fit (cannot import name 'DynamicLayer' from 'transformers.cache_utils'" in said
        assert f"pip install 'transformers{WORKING}'" in said

    def test_explained_names_a_missing_attribute(self):
        from transformers.generation import logits_process

        with pytest.raises(AttributeError) as caught:
            logits_process.GoneLogitsProcessor  # noqa: B018
        assert "has no attribute 'GoneLogitsProcessor'" in str(explained(caught.value))
        assert isinstance(explained(caught.value), IncompatibleTransformersError)

    @pytest.mark.parametrize(
        "error",
        [
            ModuleNotFoundError("No module named 'jaxtyping'", name="jaxtyping"),
            ModuleNotFoundError("No module named 'transformers_extra'", name="transformers_extra"),
            AttributeError("no x", obj=object()),
            ImportError("something else"),
        ],
    )
    def test_errors_that_are_not_transformers_stay_what_they_are(self, error):
        assert explained(error) is error
