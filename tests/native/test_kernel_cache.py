"""Compiled kernels between processes: what is trusted, what is verified, and what becomes of a broken environment."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from hf_speculate.errors import UnsupportedRequestError
from hf_speculate_gguf.native import binding as native
from hf_speculate_gguf.native import kernel_cache
from hf_speculate_gguf.native.backends import choose_backend


CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.rest,
    pytest.mark.skipif(not kernel_cache._HAS_OWNERS, reason="nothing is kept where files have no owners"),
    pytest.mark.skipif(not any(map(shutil.which, native._COMPILERS)), reason="there is no C++ compiler"),
]

# What `Library` looks for, and an answer that tells one kernel from another.
STAND_IN = """
extern "C" {{
int hfs_bf16() {{ return {answer}; }}
bool hfs_has_threads() {{ return true; }}  bool hfs_bytes() {{ return true; }}  bool hfs_pack() {{ return true; }}
bool hfs_multiply() {{ return true; }}  bool hfs_layers() {{ return true; }}  bool hfs_cut() {{ return true; }}
bool hfs_look_up() {{ return true; }}
int hfs_kind(const char *) {{ return 0; }}  int hfs_step() {{ return 0; }}  int hfs_rank() {{ return 1; }}
int hfs_draft() {{ return 0; }}  int hfs_team_size() {{ return 1; }}
long long hfs_tile_bytes(int, long long) {{ return 0; }}  long long hfs_runs() {{ return 0; }}
long long hfs_argmax() {{ return 0; }}  long long hfs_see() {{ return 0; }}
void hfs_large_pages() {{}}  void hfs_move() {{}}  void hfs_exponential() {{}}  void hfs_most_probable() {{}}
void hfs_grow() {{}}  void hfs_set_threads() {{}}
}}
"""


class User:
    """A user whose cache is empty, and a kernel that compiles in no time.

    Attributes:
        folder: where it is kept.
        compilations: commands of the compiler, those for its version left out.
        warnings: as logged.
    """

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        self.monkeypatch, self.home = monkeypatch, tmp_path / "home"
        self.folder = self.home / ".cache" / "hf_speculate"
        self.compilations: list[list[str]] = []
        self.warnings: list[str] = []
        for name in ("XDG_CACHE_HOME", kernel_cache.SHARED_VARIABLE, "CXX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(self.home))
        self.home.mkdir()
        (tmp_path / "temporary").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        self.source = tmp_path / "stand_in.cpp"
        self.source.write_text(STAND_IN.format(answer=42))
        monkeypatch.setattr(native, "SOURCE", self.source)
        run = native._run
        monkeypatch.setattr(native, "_run", lambda command: self._note(command) or run(command))
        monkeypatch.setattr(native.logger, "warning", self.warnings.append)

    def _note(self, command):
        if "-o" in command:
            self.compilations.append(command)

    def starts_process(self) -> str:
        """The problem of a new process; forgets what earlier ones did."""
        self.compilations.clear()
        self.warnings.clear()
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


def test_one_compilation_serves_many_processes(user):
    kept = user.has_compiled()
    assert len(user.compilations) == 1
    before = kept.stat().st_mtime_ns
    assert user.starts_process() == ""
    assert native.library().bf16 == 42
    assert not user.compilations
    assert not user.warnings
    assert kept.stat().st_mtime_ns == before
    assert list(user.folder.iterdir()) == [kept], "nothing half-written is left"
    user.monkeypatch.setattr(native, "_processor", lambda: "another")
    assert user.starts_process() == ""
    assert len(user.compilations) == 1
    assert not os.listdir(tempfile.gettempdir())


DAMAGES = {
    "empty": lambda data: b"",
    "one byte": lambda data: b"x",
    "half": lambda data: data[: len(data) // 2],
    "a page": lambda data: data[:4096],
    "cut by a byte": lambda data: data[:-1],
    "pages of zeros": lambda data: data[:1024] + bytes(len(data) - 2048) + data[-1024:],
    "one bit": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "text": lambda data: b"hello\n" * 100,
    "without its hash": lambda data: data[: data.index(kernel_cache._MARK)],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_kernel_is_made_anew(user, damage):
    kept = user.has_compiled()
    whole = kept.read_bytes()
    kept.write_bytes(DAMAGES[damage](whole))
    assert user.starts_process() == ""
    assert native.library().bf16 == 42
    assert len(user.compilations) == 1
    assert len(user.warnings) == 1
    assert "damaged" in user.warnings[0]
    assert user.starts_process() == ""
    assert not user.compilations, "it was repaired"
    assert not user.warnings


def test_a_kernel_under_the_name_of_another_is_not_loaded(user):
    kept = user.has_compiled()
    user.source.write_text(STAND_IN.format(answer=7))
    assert user.starts_process() == ""
    (other,) = set(user.folder.iterdir()) - {kept}
    shutil.copy(kept, other)
    assert user.starts_process() == ""
    assert native.library().bf16 == 7


def belongs_to_another(kept, monkeypatch):
    monkeypatch.setattr(kernel_cache, "_trusted_owners", lambda: (os.geteuid() + 54321,))


UNTRUSTED = {
    "file that everybody writes": (lambda kept, patch: kept.chmod(0o666), "can be written by everybody"),
    "file that a group writes": (lambda kept, patch: kept.chmod(0o660), "can be written by a group"),
    "folder that everybody writes": (lambda kept, patch: kept.parent.chmod(0o777), "can be written by everybody"),
    "folder that a group writes": (lambda kept, patch: kept.parent.chmod(0o770), "can be written by a group"),
    "folder of another user": (belongs_to_another, "belongs to user"),
    "link": (lambda kept, patch: kept.symlink_to(kept.rename(kept.parent.parent / "elsewhere")), "symbolic link"),
    "pipe": (lambda kept, patch: (kept.unlink(), os.mkfifo(kept)), "not a file"),
    "folder": (lambda kept, patch: (kept.unlink(), kept.mkdir()), "not a file"),
}


@pytest.mark.parametrize("how", UNTRUSTED)
def test_what_others_can_have_written_is_not_loaded(user, how):
    kept = user.has_compiled()
    change, problem = UNTRUSTED[how]
    change(kept, user.monkeypatch)
    assert user.starts_process() == ""
    assert len(user.compilations) == 1
    assert len(user.warnings) == 1
    assert problem in user.warnings[0]


def test_a_file_of_another_user_is_not_loaded(user):
    """In a folder of ours: e.g. from a time when others could write there."""
    user.has_compiled()
    check = kernel_cache._check_trusted

    def foreign(status, what):
        if what == "the file":
            values = list(status)
            values[stat.ST_UID] = os.geteuid() + 54321
            status = os.stat_result(values)
        check(status, what)

    user.monkeypatch.setattr(kernel_cache, "_check_trusted", foreign)
    assert user.starts_process() == ""
    assert len(user.compilations) == 1
    assert "belongs to user" in user.warnings[0]


@pytest.mark.parametrize("how", ["relative", "tilde", "no home"])
def test_the_current_folder_is_no_cache(user, tmp_path, how):
    user.monkeypatch.chdir(user.home)
    if how == "no home":
        user.monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    else:
        user.monkeypatch.setenv("XDG_CACHE_HOME", {"relative": "rel", "tilde": "~/rel"}[how])
    assert user.starts_process() == ""
    assert len(user.warnings) == 1
    assert "not an absolute path" in user.warnings[0]
    assert os.listdir(user.home) == ([] if how == "no home" else [".cache"])
    user.starts_process()
    assert len(user.compilations) == (how == "no home"), "the home's cache serves where there is one"


@pytest.mark.parametrize("place", ["/dev/full", "/proc/nowhere", "a file"])
def test_a_cache_that_cannot_be_written_is_reported(user, tmp_path, place):
    if place == "a file":
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "hf_speculate").touch()
        place = str(tmp_path / "cache")
    user.monkeypatch.setenv("XDG_CACHE_HOME", place)
    for _ in range(2):
        assert user.starts_process() == ""
        assert native.library().bf16 == 42
        assert len(user.compilations) == 1
        assert len(user.warnings) == 1
        assert place in user.warnings[0]
    assert not os.listdir(tempfile.gettempdir())


def test_a_linked_folder_is_followed(user, tmp_path):
    real = tmp_path / "scratch"
    real.mkdir(mode=0o700)
    user.folder.parent.mkdir(parents=True)
    user.folder.symlink_to(real)
    kept = user.has_compiled()
    assert (real / kept.name).is_file()
    user.starts_process()
    assert not user.compilations


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_kernels_are_private_unless_shared_on_purpose(user, tmp_path, umask):
    before = os.umask(umask)
    try:
        kept = user.has_compiled()
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
        user.monkeypatch.setenv(kernel_cache.SHARED_VARIABLE, str(tmp_path / "shared"))
        kept.unlink()
        assert user.starts_process() == ""
        (shared,) = (tmp_path / "shared").iterdir()
        assert stat.S_IMODE(shared.stat().st_mode) == 0o644
        assert stat.S_IMODE(shared.parent.stat().st_mode) == 0o755
    finally:
        os.umask(before)


def test_a_shared_cache_serves_users_who_cannot_write_it(user, tmp_path):
    shared = tmp_path / "shared"
    user.monkeypatch.setenv(kernel_cache.SHARED_VARIABLE, str(shared))
    assert user.starts_process() == ""
    write = kernel_cache._write

    def read_only(folder, *arguments):
        if os.path.samestat(os.fstat(folder), shared.stat()):
            raise PermissionError(13, "Permission denied")
        write(folder, *arguments)

    user.monkeypatch.setattr(kernel_cache, "_write", read_only)
    assert user.starts_process() == ""
    assert not user.compilations
    assert not user.folder.exists()
    user.source.write_text(STAND_IN.format(answer=7))
    user.has_compiled()
    assert not user.warnings, "what is missing there is kept in the user's own cache"
    user.starts_process()
    assert not user.compilations


def test_a_shared_cache_serves_users_without_home(user, tmp_path):
    user.monkeypatch.setenv(kernel_cache.SHARED_VARIABLE, str(tmp_path / "shared"))
    user.monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    for num_compilations in (1, 0):
        assert user.starts_process() == ""
        assert len(user.compilations) == num_compilations
        assert not user.warnings


def test_a_shared_cache_is_filled_with_what_its_owner_has(user, tmp_path):
    kept, shared = user.has_compiled(), tmp_path / "shared"
    user.monkeypatch.setenv(kernel_cache.SHARED_VARIABLE, str(shared))
    assert user.starts_process() == ""
    assert not user.compilations
    assert (shared / kept.name).read_bytes() == kept.read_bytes()
    assert not user.warnings


def test_a_shared_cache_that_cannot_be_used_is_reported(user):
    user.monkeypatch.setenv(kernel_cache.SHARED_VARIABLE, "shared")
    user.has_compiled()
    (warning,) = user.warnings
    assert "$HF_SPECULATE_CACHE is 'shared', not an absolute path" in warning


def test_it_is_on_the_disk_before_it_has_its_name(user):
    calls = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)
        user.monkeypatch.setattr(os, name, lambda *a, n=name, o=original, **k: (calls.append(n), o(*a, **k))[1])
    user.has_compiled()
    assert calls == ["fsync", "replace", "fsync"]


def test_what_killed_processes_left_is_removed_after_a_day(user):
    kept = user.has_compiled()
    temporary = Path(tempfile.gettempdir())
    places = {"old": [], "new": []}
    for age, paths in places.items():
        paths += [user.folder / f".native-{age}.so.0123", temporary / f"{kernel_cache._TEMPORARY}{age}"]
        paths[0].write_bytes(b"half")
        paths[1].mkdir()
        (paths[1] / "native.so").write_bytes(b"half")
    (temporary / "hf_speculate-other").mkdir()
    for path in (*places["old"], temporary / "hf_speculate-other", kept):
        os.utime(path, (0, time.time() - kernel_cache.LEFTOVER_SECONDS - 60))
    kept.write_bytes(b"damaged: it is compiled again")
    assert user.starts_process() == ""
    assert not any(path.exists() for path in places["old"])
    assert all(path.exists() for path in (*places["new"], temporary / "hf_speculate-other", kept))


def test_a_full_disk_leaves_nothing(user):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    user.monkeypatch.setattr(os, "fsync", full)
    assert user.starts_process() == ""
    assert list(user.folder.iterdir()) == []
    assert "No space left on device" in user.warnings[0]


def test_what_was_verified_is_what_is_loaded(user):
    """The file is cut, or exchanged, between the two."""
    kept = user.has_compiled()

    def cut(library):
        kept.write_bytes(b"")
        return kernel_cache.load(library)

    user.monkeypatch.setattr(native, "load", cut)
    assert user.starts_process() == ""
    assert native.library().bf16 == 42
    assert not user.compilations


def test_libraries_load_without_memory_files(user):
    """Systems other than Linux, and those that forbid it."""
    user.monkeypatch.delattr(os, "memfd_create", raising=False)
    for answer in (1, 2):
        user.source.write_text(STAND_IN.format(answer=answer))
        assert user.starts_process() == ""
        assert native.library().bf16 == answer
    assert not os.listdir(tempfile.gettempdir())


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no files in memory")
def test_what_was_kept_needs_no_temporary_file(user):
    """Folders for those may be full, or forbid to run what lies there."""
    user.has_compiled()
    user.monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda **_: pytest.fail("a file was written"))
    assert user.starts_process() == ""


def test_processes_that_compile_at_the_same_time(user):
    barrier, compile_source, found = threading.Barrier(3), native.compile_source, []
    user.monkeypatch.setattr(native, "compile_source", lambda compiler: (barrier.wait(60), compile_source(compiler))[1])
    threads = [threading.Thread(target=lambda: found.append(native.build().bf16)) for _ in range(3)]
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

    def test_a_blank_name_is_none(self, user):
        user.monkeypatch.setenv("CXX", "   ")
        user.has_compiled()
        assert not user.warnings

    def test_what_it_says_of_the_source_is_reported_once(self, user):
        user.source.write_text("int main() { return nonsense; }")
        self.falls_back(user, "nonsense")
        assert choose_backend("auto", CPU, torch.float32) is None
        assert len(user.compilations) == 1
        assert len(user.warnings) == 1

    @pytest.mark.parametrize(
        ("command", "problem"),
        [
            ('g++ "', "No closing quotation"),
            ("no-such-compiler -O2", "there is no C++ compiler 'no-such-compiler' (from $CXX)"),
            ("/bin/true", "wrote nothing"),
            ("/bin/false", "failed with status 1"),
            ("/proc/self/cmdline", "there is no C++ compiler"),
        ],
    )
    def test_one_that_does_not_work_is_reported(self, user, command, problem):
        user.monkeypatch.setenv("CXX", command)
        self.falls_back(user, problem)

    def test_one_that_writes_something_else_is_reported(self, user, tmp_path):
        compiler = script(tmp_path / "cc", 'while [ $# -gt 1 ]; do shift; done; [ "$1" = --version ] || echo hi > "$1"')
        user.monkeypatch.setenv("CXX", compiler)
        self.falls_back(user, "cannot be loaded")

    @pytest.mark.parametrize("share", [2, 10, 100])
    def test_one_that_writes_a_part_is_reported(self, user, tmp_path, share):
        """The loader would map pages behind the end of the file, and the process would die of SIGBUS."""
        user.source.write_text(f"{STAND_IN.format(answer=42)}\nchar large[400000] = {{1}};")
        compiler = next(filter(None, map(shutil.which, native._COMPILERS)))
        cut = f'truncate -s $(($(stat -c %s "$o") - $(stat -c %s "$o") / {share})) "$o"'
        find = 'while [ $# -gt 1 ]; do shift; done; o="$1"'
        command = f'case "$*" in *--version) echo 1; exit;; esac\n{compiler} "$@"\n{find}\n{cut}'
        user.monkeypatch.setenv("CXX", script(tmp_path / "cc", command))
        self.falls_back(user, "it is cut off: of at least")

    def test_without_any_the_modules_compute(self, user):
        user.monkeypatch.setenv("PATH", "/nowhere")
        self.falls_back(user, "there is no C++ compiler ($CXX, g++")

    def test_without_a_folder_for_temporary_files_the_modules_compute(self, user):
        def missing(*args, **kwargs):
            raise FileNotFoundError(2, "No usable temporary directory found")

        user.monkeypatch.setattr(tempfile, "TemporaryDirectory", missing)
        user.starts_process()
        assert choose_backend("auto", CPU, torch.float32) is None
        assert len(user.warnings) == 1

    def test_one_that_prints_no_utf8_compiles(self, user, tmp_path):
        compiler = next(filter(None, map(shutil.which, native._COMPILERS)))
        user.monkeypatch.setenv("CXX", script(tmp_path / "cc", f"printf 'caf\\351'; exec {compiler} \"$@\""))
        user.has_compiled()
        assert not user.warnings

    def test_what_was_kept_needs_none(self, user):
        user.has_compiled()
        user.monkeypatch.setenv("PATH", "/nowhere")
        assert user.starts_process() == ""
        assert native.library().bf16 == 42
        assert not user.warnings

    @pytest.mark.parametrize("command", ["no-such-compiler", "/bin/true", 'g++ "'])
    def test_what_was_kept_serves_where_one_fails(self, user, command):
        user.has_compiled()
        user.monkeypatch.setenv("CXX", command)
        assert user.starts_process() == ""
        assert native.library().bf16 == 42
        assert len(user.warnings) == 1
        assert "a kernel that was kept is used" in user.warnings[0]

    def test_what_is_damaged_cannot_be_made_anew(self, user):
        kept = user.has_compiled()
        kept.write_bytes(kept.read_bytes()[:5000])
        user.monkeypatch.setenv("PATH", "/nowhere")
        problem = user.starts_process()
        assert "there is no C++ compiler" in problem
        assert "damaged" in problem
        assert len(user.warnings) == 1
