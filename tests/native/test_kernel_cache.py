"""Compiled kernels between processes: what is trusted, what is verified, and what becomes of a broken environment."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_speculate.errors import UnsupportedRequestError
from hf_speculate_gguf.native import binding as native
from hf_speculate_gguf.native import compiler, kernel_cache
from hf_speculate_gguf.native.backends import choose_backend


CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.rest,
    pytest.mark.skipif(not any(map(shutil.which, compiler._COMPILERS)), reason="there is no C++ compiler"),
]

# What `Library` looks for, and an answer that tells one kernel from another.
STAND_IN = """
extern "C" {{
bool hfs_use_openmp(const void *) {{ return true; }}
bool hfs_bytes() {{ return true; }}  bool hfs_pack() {{ return true; }}
bool hfs_multiply() {{ return true; }}  bool hfs_layers() {{ return true; }}  bool hfs_cut() {{ return true; }}
long long hfs_sizeof(const char *) {{ return 24; }}
int hfs_kind(const char *) {{ return {answer}; }}  int hfs_step() {{ return 0; }}
int hfs_draft() {{ return 0; }}  int hfs_thread_pool_size() {{ return 1; }}
bool hfs_delta() {{ return true; }}  bool hfs_attend() {{ return true; }}
long long hfs_tile_bytes(int, long long) {{ return 0; }}  long long hfs_ranges_of_mask() {{ return 0; }}
long long hfs_argmax() {{ return 0; }}
void hfs_large_pages() {{}}  void hfs_move() {{}}  void hfs_exponential() {{}}  void hfs_most_probable() {{}}
void hfs_set_threads() {{}}
}}
"""


def structure_of(count: int) -> type[ctypes.Structure]:
    return type("Structure", (ctypes.Structure,), {"_fields_": [("values", ctypes.c_int64 * count)]})


class User:
    """A user whose cache is empty, and a kernel that compiles in no time.

    Attributes:
        folder: where it is kept.
        compilations: commands of the compiler.
        warnings: as logged, but for the progress of the compiler.
        progress: lines on the compiler, as a log file gets them.
    """

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        self.monkeypatch, self.home = monkeypatch, tmp_path / "home"
        self.folder = self.home / ".cache" / "hf_speculate"
        self.compilations: list[list[str]] = []
        self.warnings: list[str] = []
        self.progress: list[str] = []
        for name in ("XDG_CACHE_HOME", kernel_cache.FOLDER_VARIABLE, "CXX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(self.home))
        self.home.mkdir()
        (tmp_path / "temporary").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        self.source = tmp_path / "stand_in.cpp"
        self.source.write_text(STAND_IN.format(answer=42))
        monkeypatch.setattr(compiler, "KERNEL", tmp_path)
        monkeypatch.setattr(native, "MIRRORED", {"Call": structure_of(3)})
        run = compiler._run

        def note(command: list[str]) -> Any:
            if "-c" in command:
                self.compilations.append(command)
            return run(command)

        monkeypatch.setattr(compiler, "_run", note)

        def warn(text: str) -> None:
            (self.progress if text.startswith("compil") else self.warnings).append(text)

        for module in (native, compiler):
            monkeypatch.setattr(module.logger, "warning", warn)

    def starts_process(self) -> str:
        """The problem of a new process; forgets what earlier ones did."""
        self.compilations.clear()
        self.warnings.clear()
        self.progress.clear()
        native.library.cache_clear()
        native.native_problem.cache_clear()
        return native.native_problem()

    def has_compiled(self) -> Path:
        """The file that a first process leaves."""
        assert self.starts_process() == ""
        (kept,) = self.folder.iterdir()
        return kept


@pytest.fixture
def user(tmp_path, monkeypatch):
    yield User(tmp_path, monkeypatch)
    native.library.cache_clear()
    native.native_problem.cache_clear()


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_kernel_is_compiled_once_for_many_processes(user):
    kept = user.has_compiled()
    assert len(user.compilations) == 1
    before = kept.stat().st_mtime_ns
    assert user.starts_process() == ""
    assert native.library().kinds["F32"] == 42
    assert not user.compilations
    assert not user.warnings
    assert kept.stat().st_mtime_ns == before
    assert list(user.folder.iterdir()) == [kept], "nothing half-written is left"
    user.monkeypatch.setattr(compiler, "_processor", lambda: "another")
    assert user.starts_process() == ""
    assert len(user.compilations) == 1
    assert not os.listdir(tempfile.gettempdir())


def test_kernel_is_compiled_again_for_changed_sources_only(user, tmp_path):
    kept = user.has_compiled()
    (tmp_path / "README.md").write_text("A map.")
    assert user.starts_process() == ""
    assert not user.compilations
    (tmp_path / "more.h").write_text("// another source")
    assert user.starts_process() == ""
    assert len(user.compilations) == 1
    assert kept in user.folder.iterdir()


def test_compilation_is_logged_and_shown_on_a_terminal(user):
    user.has_compiled()
    begin, end = user.progress
    assert re.fullmatch(r"compiling the kernel for GGUF weights with \S+: about a minute, .*", begin)
    assert re.fullmatch(r"compiled the kernel for GGUF weights in \d+ s", end)
    assert user.starts_process() == ""
    assert not user.progress, "it is in the cache"
    user.monkeypatch.setattr(compiler, "_processor", lambda: "another")
    console = compiler.Console  # type: ignore
    user.monkeypatch.setattr(compiler, "Console", lambda **given: console(**given, force_terminal=True, quiet=True))
    assert user.starts_process() == ""
    assert user.compilations
    assert not user.progress


def test_unusable_cache_is_reported_before_the_compiler_runs(user):
    user.has_compiled()
    user.folder.chmod(0o777)
    compile_kernel, seen = native.compile_kernel, []
    user.monkeypatch.setattr(
        native, "compile_kernel", lambda *given: (seen.extend(user.warnings), compile_kernel(*given))
    )
    assert user.starts_process() == ""
    assert seen == user.warnings
    assert "Set HF_SPECULATE_CACHE to an absolute path that only you can write" in seen[0]


DAMAGES = {
    "empty": lambda data: b"",
    "one bit": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "without its hash": lambda data: data[:-32],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_kernel_is_compiled_again(user, damage):
    kept = user.has_compiled()
    replace(kept, DAMAGES[damage](kept.read_bytes()))
    assert user.starts_process() == ""
    assert native.library().kinds["F32"] == 42
    assert len(user.compilations) == 1
    assert user.starts_process() == ""
    assert not user.compilations, "it was repaired"
    assert not user.warnings


def replace(path: Path, content: bytes) -> None:
    """Writes another file: the old one may be mapped into this process."""
    path.unlink()
    path.write_bytes(content)


def test_a_kernel_under_the_name_of_another_is_not_loaded(user):
    kept = user.has_compiled()
    user.source.write_text(STAND_IN.format(answer=7))
    assert user.starts_process() == ""
    (other,) = set(user.folder.iterdir()) - {kept}
    replace(other, kept.read_bytes())
    assert user.starts_process() == ""
    assert native.library().kinds["F32"] == 7


def test_a_kernel_with_structures_of_another_size_is_an_error_and_not_compiled_again(user):
    user.has_compiled()
    user.monkeypatch.setattr(native, "MIRRORED", {"Call": structure_of(4)})
    assert "structure Call has 24 bytes in the kernel and 32 in Python" in user.starts_process()
    assert not user.compilations
    assert "install hf_speculate again" in user.warnings[0]


def belongs_to_another(folder, patch):
    if os.geteuid() == 0:
        os.chown(folder, 54321, -1)
    else:
        patch.setattr(os, "geteuid", lambda: 54321)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda folder, patch: folder.chmod(0o777), "others can write it"),
        (lambda folder, patch: folder.chmod(0o770), "others can write it"),
        (belongs_to_another, "it belongs to user"),
    ],
)
def test_kernel_that_others_could_write_is_not_loaded(user, change, problem):
    kept = user.has_compiled()
    change(kept.parent, user.monkeypatch)
    assert user.starts_process() == ""
    assert len(user.compilations) == 1
    assert len(user.warnings) == 1
    assert problem in user.warnings[0]


def test_kernel_cache_is_never_the_current_folder(user):
    user.monkeypatch.chdir(user.home)
    user.monkeypatch.setenv("XDG_CACHE_HOME", "rel")
    assert user.starts_process() == ""
    assert len(user.warnings) == 1
    assert "not an absolute path" in user.warnings[0]
    assert os.listdir(user.home) == []


@pytest.mark.parametrize("place", ["/dev/full", "/proc/nowhere", "a file"])
def test_unwritable_cache_is_reported_once(user, tmp_path, place):
    """The library is loaded from the temporary folder that it was compiled in."""
    if place == "a file":
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "hf_speculate").touch()
        place = str(tmp_path / "cache")
    user.monkeypatch.setenv("XDG_CACHE_HOME", place)
    for _ in range(2):
        assert user.starts_process() == ""
        assert native.library().kinds["F32"] == 42
        assert len(user.compilations) == 1
        assert len(user.warnings) == 1
        assert place in user.warnings[0]
        assert kernel_cache.FOLDER_VARIABLE in user.warnings[0]
    assert not os.listdir(tempfile.gettempdir())


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_kernel_files_are_private(user, umask):
    before = os.umask(umask)
    try:
        kept = user.has_compiled()
    finally:
        os.umask(before)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700


def test_kernel_cache_can_be_another_folder(user, tmp_path):
    user.monkeypatch.setenv(kernel_cache.FOLDER_VARIABLE, str(tmp_path / "other"))
    for num_compilations in (1, 0):
        assert user.starts_process() == ""
        assert len(user.compilations) == num_compilations
    assert len(list((tmp_path / "other").iterdir())) == 1
    assert not user.folder.exists()
    assert not user.warnings


def test_compilation_on_a_full_disk_leaves_no_file(user):
    def full(source, destination):
        raise OSError(28, "No space left on device")

    user.monkeypatch.setattr(os, "replace", full)
    assert user.starts_process() == ""
    assert native.library().kinds["F32"] == 42
    assert list(user.folder.iterdir()) == []
    assert "No space left on device" in user.warnings[0]


def test_kernel_can_be_compiled_by_two_processes_at_once(user):
    barrier, compile_kernel, found = threading.Barrier(3), native.compile_kernel, []
    user.monkeypatch.setattr(native, "compile_kernel", lambda *given: (barrier.wait(60), compile_kernel(*given)))
    threads = [threading.Thread(target=lambda: found.append(native.build().kinds["F32"])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [42] * 3
    assert len(list(user.folder.iterdir())) == 1


class TestCompilers:
    def falls_back(self, user, problem):
        user.starts_process()
        assert choose_backend("auto", CPU, torch.float32) is None
        assert len(user.warnings) == 1
        assert problem in user.warnings[0]
        with pytest.raises(UnsupportedRequestError, match="'native' cannot be used here"):
            choose_backend("native", CPU, torch.float32)
        assert not user.folder.exists() or not list(user.folder.iterdir())
        assert not os.listdir(tempfile.gettempdir())

    @pytest.mark.parametrize(
        ("command", "problem"),
        [
            ('g++ "', "No closing quotation"),
            ("no-such-compiler -O2", "there is no C++ compiler 'no-such-compiler' (from $CXX)"),
            ("/bin/true", "wrote nothing"),
            ("/bin/false", "failed with status 1"),
        ],
    )
    def test_compiler_that_fails_is_reported(self, user, command, problem):
        user.monkeypatch.setenv("CXX", command)
        self.falls_back(user, problem)

    def test_compiler_that_writes_no_library_is_reported(self, user, tmp_path):
        compiler = script(tmp_path / "cc", 'while [ $# -gt 1 ]; do shift; done; echo hi > "$1"')
        user.monkeypatch.setenv("CXX", compiler)
        self.falls_back(user, "cannot be loaded")

    def test_modules_compute_without_a_compiler(self, user):
        user.monkeypatch.setenv("PATH", "/nowhere")
        user.monkeypatch.setitem(sys.modules, "ziglang", None)
        self.falls_back(
            user, "there is no C++ compiler ($CXX, g++, clang++, c++). `pip install ziglang` (100 MB) brings"
        )

    def test_modules_compute_without_a_temporary_folder(self, user):
        def missing(*args, **kwargs):
            raise FileNotFoundError(2, "No usable temporary directory found")

        user.monkeypatch.setattr(tempfile, "TemporaryDirectory", missing)
        user.starts_process()
        assert choose_backend("auto", CPU, torch.float32) is None
        assert len(user.warnings) == 1

    def test_cached_kernel_needs_no_compiler(self, user):
        user.has_compiled()
        user.monkeypatch.setenv("PATH", "/nowhere")
        assert user.starts_process() == ""
        assert native.library().kinds["F32"] == 42
        assert not user.warnings
