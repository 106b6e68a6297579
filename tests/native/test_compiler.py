"""The compiler of the kernel: which one is taken, and libraries for other systems.

Only ziglang compiles for other systems; `make cross` installs it. Nothing runs there: a program that uses every
function of the kernel is linked with the library, as a loader would.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_speculate_gguf.native import binding, compiler
from hf_speculate_gguf.native.formats import FORMATS

from ..support.packed import ids, make_matrix, pack, shape_of, write_model


needs_ziglang = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed (`make cross` installs it)"
)

# Systems, with the CPU to compile for.
TARGETS = {
    "x86_64-windows-gnu": "-mcpu=haswell",
    "aarch64-macos": "-mcpu=apple_m1",
    "aarch64-linux-gnu": "-mcpu=neoverse_n1",
}


@pytest.fixture
def compilers(tmp_path, monkeypatch):
    """Puts compilers of these names into an otherwise empty search path; returns their folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setitem(sys.modules, "ziglang", None)

    def install(*names: str) -> Path:
        for name in names:
            (folder / name).touch(mode=0o755)
        return folder

    return install


@pytest.fixture
def ziglang(tmp_path, monkeypatch):
    """A package of this name that can be found."""
    monkeypatch.delitem(sys.modules, "ziglang", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    (tmp_path / "packages" / "ziglang").mkdir(parents=True)
    (tmp_path / "packages" / "ziglang" / "__init__.py").touch()


def test_find_compiler_prefers_gxx(compilers):
    folder = compilers("c++", "clang++", "g++")
    for name in ("g++", "clang++", "c++"):
        assert compiler.find_compiler() == [str(folder / name)]
        (folder / name).unlink()


def test_find_compiler_takes_ziglang_if_there_is_no_other(compilers, ziglang):
    assert compiler.find_compiler() == [sys.executable, "-m", "ziglang", "c++"]
    folder = compilers("clang++")
    assert compiler.find_compiler() == [str(folder / "clang++")]


def test_find_compiler_takes_the_users_choice_first(compilers, monkeypatch):
    compilers("g++", "mine")
    monkeypatch.setenv("CXX", "mine -g 'a b'")
    assert compiler.find_compiler() == ["mine", "-g", "a b"]


def test_find_compiler_without_any_says_how_to_get_one(compilers):
    with pytest.raises(compiler.NativeError, match="`pip install ziglang`"):
        compiler.find_compiler()


def test_compile_kernel_links_without_the_library_that_ziglang_would_compile(tmp_path, monkeypatch):
    commands: list[list[str]] = []

    def run(command: list[str]) -> Any:
        commands.append(command)
        return compiler.subprocess.run(["touch", command[-1]], check=True)

    monkeypatch.setattr(compiler, "_run", run)
    for command, is_ziglang in ((["g++"], False), ([sys.executable, "-m", "ziglang", "c++"], True)):
        commands.clear()
        compiler.compile_kernel(command, tmp_path / "kernel", "-mcpu=apple_m1")
        *objects, link = commands
        assert len(objects) == len(list(compiler.KERNEL.glob("*.cpp")))
        assert all("-nostdlib++" not in command for command in objects), "it would take the headers away, too"
        assert ("-nostdlib++" in link) == is_ziglang
        assert all("-mcpu=apple_m1" in command for command in commands)


@pytest.mark.parametrize(("system", "suffix"), [("linux", ".so"), ("darwin", ".dylib"), ("win32", ".dll")])
def test_library_name_ends_as_libraries_of_the_system_do(system, suffix, monkeypatch):
    monkeypatch.setattr(compiler.sys, "platform", system)
    assert compiler.library_name().endswith(suffix)


def test_find_openmp_finds_the_threads_of_torch():
    functions = binding.find_openmp()
    assert functions.GOMP_parallel
    assert functions.omp_get_num_threads
    assert functions.omp_set_num_threads


def test_find_openmp_asks_for_all_loaded_libraries_except_on_windows(monkeypatch):
    """Windows has no handle of everything that is loaded: there only torch's own libraries are opened."""
    opened: list[str] = []

    def load(name, *_):
        if name is None:
            raise TypeError("LoadLibrary() argument 1 must be str, not None")
        opened.append(name)

    monkeypatch.setattr(binding.ctypes, "CDLL", load)
    with pytest.raises(TypeError):
        binding.find_openmp()
    assert not opened
    monkeypatch.setattr(binding, "os", SimpleNamespace(name="nt"))
    binding.find_openmp()
    assert all("libgomp" in name for name in opened)


@pytest.mark.slow
@needs_ziglang
@pytest.mark.parametrize("target", TARGETS)
def test_kernel_compiles_for_other_systems(target, tmp_path):
    """Libraries have every function that `Library` loads, and miss none but those of the system."""
    zig = [sys.executable, "-m", "ziglang"]
    library = tmp_path / f"kernel{'.dll' if 'windows' in target else '.so'}"
    compiler.compile_kernel([*zig, "c++", "-target", target], library, TARGETS[target])
    names = [name for name, *_ in binding.FUNCTIONS]
    for extra, links in (([], True), (["hfs_missing"], False)):
        declared = "".join(f"void {name}(void);\n" for name in names + extra)
        source = tmp_path / "uses.c"
        source.write_text(f"{declared}int main() {{ {' '.join(f'{name}();' for name in names + extra)} }}\n")
        command = [*zig, "cc", "-target", target, str(source), _to_link(library), "-o", str(tmp_path / "uses")]
        done = compiler._run(command)
        assert (done.returncode == 0) == links, done.stderr


def _to_link(library: Path) -> str:
    """On Windows programs link with a file that the compiler writes beside the library."""
    return str(library if library.suffix != ".dll" else next(library.parent.glob("*.lib")))


@pytest.mark.slow
@needs_ziglang
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_ziglang_gives_the_bits_of_gxx(tmp_path, monkeypatch):
    """Products of all types, and logits of whole models."""
    inputs = [torch.randn(count, 512) for count in (1, 3, 8, 17)]
    found = {}
    for name, command in (("g++", ["g++"]), ("ziglang", [*compiler._ZIGLANG])):
        compiler.compile_kernel(command, tmp_path / f"{name}.so")
        library = binding.Library(tmp_path / f"{name}.so")
        monkeypatch.setattr(binding, "library", lambda library=library: library)
        found[name] = [*_products(library, tmp_path, inputs), *_logits(tmp_path)]
    assert len(found["g++"]) == len(FORMATS) * 4 * len(inputs) + 12
    for mine, other in zip(*found.values(), strict=True):
        assert torch.equal(mine, other)


def _products(library, folder, inputs):
    for kind in FORMATS:
        packed = pack(make_matrix(folder, kind, 40), "native", torch.float32).packed
        for dtype in (torch.float32, torch.bfloat16):
            for quantize in (False, True):
                yield from (library.multiply(rows.to(dtype), packed, kind, 40, quantize) for rows in inputs)


@torch.no_grad()
def _logits(folder):
    from hf_speculate_gguf import load_model

    for architecture in ("llama", "qwen3"):
        path = write_model(folder / f"{architecture}.gguf", shape_of(architecture), "Q4_K")
        for backend, dtype in (("native", torch.float32), ("native", torch.bfloat16), ("native-int8", torch.bfloat16)):
            model = load_model(os.fspath(path), dtype=dtype, backend=backend)
            yield from (model(ids(1, count)).logits for count in (3, 40))
