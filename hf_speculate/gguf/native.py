"""Compiles `native.cpp` at first use, keeps the library in the user's cache, and calls it.

The compiler is `$CXX`, else the first of g++, clang++ and c++ that is found. A library is looked up by a hash of the
source, the command, the compiler's version and the CPU: a folder that several machines share is no danger.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from transformers.utils import logging

from ..errors import SpeculateError
from .formats import FORMATS


logger = logging.get_logger(__name__)

SOURCE = Path(__file__).with_name("native.cpp")

# Rows of a matrix that lie together.
TILE_ROWS = 16

_COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-w")


class NativeError(SpeculateError):
    """The library cannot be had here; says why, with what the compiler said."""


class Library:
    """The functions of `native.cpp`.

    Attributes:
        bf16: what multiplies bfloat16: 0 float32 arithmetic, 1 AVX512_BF16, 2 AMX.
    """

    def __init__(self, path: Path):
        functions = ctypes.CDLL(str(path))
        integer, size, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
        for name, result, arguments in (
            ("hfs_kind", integer, (ctypes.c_char_p,)),
            ("hfs_has_threads", ctypes.c_bool, ()),
            ("hfs_bf16", integer, ()),
            ("hfs_tile_bytes", size, (integer, size)),
            ("hfs_pack", ctypes.c_bool, (integer, pointer, size, size, pointer, integer)),
            ("hfs_multiply", ctypes.c_bool, (integer, pointer, size, size, pointer, size, pointer, integer, integer)),
        ):
            function = getattr(functions, name)
            function.restype, function.argtypes = result, arguments
        self._functions = functions
        self._kinds = {name: functions.hfs_kind(name.encode()) for name in FORMATS}
        self.bf16: int = functions.hfs_bf16()
        self.has_threads: bool = functions.hfs_has_threads()

    def tile_bytes(self, block_type: str, in_features: int) -> int:
        """Bytes of 16 rows."""
        return self._functions.hfs_tile_bytes(self._kinds[block_type], in_features)

    def pack(
        self, block_type: str, rows: UInt8[Tensor, "R bytes"], in_features: int, tiles: UInt8[Tensor, "T bytes"]
    ) -> bool:
        """Writes rows of blocks into tiles of zeros; False where a scale or an offset is not finite."""
        rows = rows.contiguous()
        kind, threads = self._kinds[block_type], torch.get_num_threads()
        return self._functions.hfs_pack(kind, rows.data_ptr(), len(rows), in_features, tiles.data_ptr(), threads)

    def multiply(
        self, inputs: Float[Tensor, "M K"], tiles: UInt8[Tensor, "T bytes"], block_type: str, out_features: int
    ) -> Float[Tensor, "M N"]:
        """x @ w.T in the dtype of the inputs, computed in bfloat16 x float32 where they are that, else in float32."""
        bf16 = self.bf16 if inputs.dtype is torch.bfloat16 else 0
        values = (inputs if bf16 else inputs.float()).contiguous()
        products = torch.empty(len(inputs), out_features, dtype=values.dtype)
        is_done = self._functions.hfs_multiply(
            self._kinds[block_type],
            tiles.data_ptr(),
            inputs.shape[1],
            out_features,
            values.data_ptr(),
            len(inputs),
            products.data_ptr(),
            bf16,
            torch.get_num_threads(),
        )
        if not is_done:
            raise MemoryError(f"no memory to multiply {len(inputs)} rows of {inputs.shape[1]}")
        return products.to(inputs.dtype)


@functools.cache
def native_problem() -> str:
    """Why there is no library; "" where there is one. Compiles at most once in a process."""
    try:
        library()
    except NativeError as error:
        return str(error)
    return ""


@functools.cache
def library() -> Library:
    """Compiled or from the cache; raises `NativeError`."""
    path = build()
    try:
        _share_threads()
        found = Library(path)
    except (OSError, AttributeError) as error:
        raise NativeError(f"{path} cannot be loaded: {error}") from error
    if not found.has_threads and torch.get_num_threads() > 1:
        raise NativeError("torch's threads cannot be used: its OpenMP library has no GOMP_parallel")
    return found


def build() -> Path:
    """The library's path, compiled if it is not in the cache; raises `NativeError`."""
    compiler = find_compiler()
    tune = "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"
    command = [*compiler, *_FLAGS, tune]
    version = _run([*compiler, "--version"]).stdout
    parts = (SOURCE.read_text(), *command, version, _processor())
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    folder = _cache_folder()
    path = folder / f"native-{digest}.so"
    if path.exists():
        return path
    logger.info(f"compiling {SOURCE} to {path}")
    # Another process may do the same: each writes a file of its own, and the last one takes the place.
    handle, written = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        done = _run([*command, str(SOURCE), "-o", written])
        if done.returncode:
            message = f"{shlex.join(command)} failed with status {done.returncode}:\n{done.stderr.strip()}"
            logger.warning(f"GGUF weights cannot be multiplied natively. {message}")
            raise NativeError(message)
        os.replace(written, path)
    finally:
        Path(written).unlink(missing_ok=True)
    return path


def find_compiler() -> list[str]:
    """The command that compiles C++; raises `NativeError`."""
    if chosen := os.environ.get("CXX"):
        command = shlex.split(chosen)
        if shutil.which(command[0]) is None:
            raise NativeError(f"there is no C++ compiler {command[0]!r} (from $CXX)")
        return command
    for name in _COMPILERS:
        if found := shutil.which(name):
            return [found]
    raise NativeError(f"there is no C++ compiler ($CXX, {', '.join(_COMPILERS)})")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"{shlex.join(command)}: {error}") from error


def _processor() -> str:
    """What -march=native may depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(fields)}))


def _cache_folder() -> Path:
    """In the user's cache; where that cannot be written, a folder that is used this once."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "hf_speculate"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="hf_speculate-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="hf_speculate-"))


def _share_threads() -> None:
    """Makes torch's OpenMP library visible to what is loaded next; it is already, as PyPI's torch comes."""
    if hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return
    try:
        loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    except OSError:
        return
    for path in sorted(loaded, key=lambda path: "torch" not in path)[:1]:
        ctypes.CDLL(path, ctypes.RTLD_GLOBAL)


def multiply(
    inputs: Float[Tensor, "M K"], tiles: UInt8[Tensor, "T bytes"], block_type: str, out_features: int
) -> Float[Tensor, "M N"]:
    """`Library.multiply`, also while torch.compile traces, which cannot look into the library."""
    if torch.compiler.is_compiling():
        return torch.ops.hf_speculate.multiply_packed(inputs, tiles, block_type, out_features)
    return library().multiply(inputs, tiles, block_type, out_features)


@torch.library.custom_op("hf_speculate::multiply_packed", mutates_args=())
def _multiply_packed(inputs: Tensor, tiles: Tensor, block_type: str, out_features: int) -> Tensor:
    return library().multiply(inputs, tiles, block_type, out_features)


@_multiply_packed.register_fake
def _(inputs, tiles, block_type, out_features):
    return inputs.new_empty(inputs.shape[0], out_features)
