"""Compiles `kernel/` at first use, keeps the library in the user's cache (`kernel_cache`), and calls it.

The compiler is `$CXX`, else the first of g++, clang++ and c++ that is found. A library's name has a hash of source,
flags and CPU, so machines can share a folder. A library that is in the cache needs no compiler.
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
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int, UInt8
from rich.console import Console  # noqa: TID251  (for words of our own)
from torch import Tensor

from hf_speculate.errors import SpeculateError
from hf_speculate.messages import get_logger
from hf_speculate.verification import stand_in

from .formats import FORMATS
from .kernel_cache import KernelCache
from .memory import address_of, address_of_strided, address_of_table, check_range


logger = get_logger(__name__)

KERNEL = Path(__file__).parent / "kernel"

# Number of rows that are packed together, and of columns that are multiplied at a time.
TILE_ROWS, TILE_COLUMNS = 16, 32

# The kernel's names for matrices that are not packed.
DENSE_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16"}

# Bytes of the part of a generator's state that the kernel reads and writes (its Twister).
_TWISTER_BYTES = 5016

_COMPILERS = ("g++", "clang++", "c++")
# GCC's first pass of scheduling, which x86 does without, spills registers of products on ARM. clang ignores the option.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-w", "-fno-schedule-insns")


# The kernel's structures that Python fills, by their names there (`mirrors`).
MIRRORED: dict[str, type[ctypes.Structure]] = {}

Mirror = TypeVar("Mirror", bound=type[ctypes.Structure])


def mirrors(name: str) -> Callable[[Mirror], Mirror]:
    """Marks a ctypes structure as the copy of the kernel's structure `name`; `Library` compares their sizes."""

    def add(structure: Mirror) -> Mirror:
        MIRRORED[name] = structure
        return structure

    return add


class NativeError(SpeculateError):
    """The library cannot be compiled or loaded; the message has the reason and the compiler's output."""


class Library:
    """The functions of `kernel/kernel.cpp`.

    Attributes:
        kinds: number of each block type and dense type in the kernel.
        multiplies_bytes: whether the CPU has instructions that multiply bytes.

    Raises:
        OSError, AttributeError: the file is not a library for this machine, or another library.
        NativeError: a structure has another size in the library than in Python.
    """

    def __init__(self, path: Path):
        functions = ctypes.CDLL(str(path))
        integer, size, pointer, flag = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_bool
        for name, result, arguments in (
            ("hfs_sizeof", size, (ctypes.c_char_p,)),
            ("hfs_kind", integer, (ctypes.c_char_p,)),
            ("hfs_has_threads", flag, ()),
            ("hfs_thread_pool_size", integer, (integer,)),
            ("hfs_set_threads", None, (integer, integer)),
            ("hfs_bytes", flag, ()),
            ("hfs_tile_bytes", size, (integer, size)),
            ("hfs_large_pages", None, (pointer, size)),
            ("hfs_pack", flag, (integer, pointer, size, size, pointer, integer)),
            ("hfs_multiply", flag, (integer, pointer, size, size, pointer, size, pointer, flag, flag, integer)),
            ("hfs_ranges_of_mask", size, (pointer, integer, *[size] * 6, flag, pointer, pointer, size)),
            ("hfs_exponential", None, (pointer, pointer, size)),
            ("hfs_argmax", size, (pointer, size, flag)),
            ("hfs_most_probable", None, (pointer, size, size, size, flag, size, pointer, pointer, integer)),
            ("hfs_layers", flag, (pointer,)),
            ("hfs_move", None, (pointer, size, pointer, pointer, size)),
            ("hfs_step", integer, (pointer,)),
            ("hfs_delta", flag, (pointer,)),
            ("hfs_attend", flag, (pointer,)),
            ("hfs_cut", flag, (pointer, size, pointer, pointer, pointer)),
            ("hfs_draft", integer, (pointer,)),
        ):
            function = getattr(functions, name)
            function.restype, function.argtypes = result, arguments
        _check_sizes(functions.hfs_sizeof)
        self.run_layers, self.step = functions.hfs_layers, functions.hfs_step
        self.ranges_of_mask = functions.hfs_ranges_of_mask
        self.ask_for_large_pages, self.move = functions.hfs_large_pages, functions.hfs_move
        self.cut, self.draft = functions.hfs_cut, functions.hfs_draft
        self.run_delta, self.attend = functions.hfs_delta, functions.hfs_attend
        self.thread_pool_size, self.set_threads = functions.hfs_thread_pool_size, functions.hfs_set_threads
        self._functions = functions
        self.kinds = {name: functions.hfs_kind(name.encode()) for name in (*FORMATS, *DENSE_KINDS.values())}
        if min(self.kinds.values()) < 0:
            raise AttributeError(f"{path} does not know all block types")
        self.multiplies_bytes: bool = functions.hfs_bytes()
        self.has_threads: bool = functions.hfs_has_threads()

    def tile_bytes(self, block_type: str, in_features: int) -> int:
        """Number of bytes of a tile of 16 rows."""
        return self._functions.hfs_tile_bytes(self.kinds[block_type], in_features)

    def pack(
        self, block_type: str, rows: UInt8[Tensor, "R bytes"], in_features: int, tiles: UInt8[Tensor, "T bytes"]
    ) -> bool:
        """Packs rows of blocks into tiles of zeros; returns False if a scale or an offset is not finite."""
        blocks = FORMATS[block_type]
        row_bytes = in_features // blocks.block_size * blocks.block_bytes
        source = address_of(rows := rows.contiguous(), torch.uint8, (len(rows), row_bytes))
        to = self.address_of_tiles(tiles, block_type, in_features, len(rows))
        kind, threads = self.kinds[block_type], torch.get_num_threads()
        return self._functions.hfs_pack(kind, source, len(rows), in_features, to, threads)

    def address_of_tiles(self, tiles: Tensor, block_type: str, in_features: int, num_rows: int) -> int:
        """The address of tiles that hold at least `num_rows` rows of a matrix; raises `WrongBufferError`."""
        width = self.tile_bytes(block_type, in_features)
        return address_of_table(tiles, torch.uint8, -(-num_rows // TILE_ROWS), width)

    def draw_exponential(self, state: UInt8[Tensor, " S"], values: Float[Tensor, "*N"]) -> None:
        """`Kernel.draw_exponential` of `hf_speculate.verification`."""
        check_range("the size of a generator's state", state.numel(), _TWISTER_BYTES, 2 * _TWISTER_BYTES)
        of_state = address_of(state, torch.uint8, (state.numel(),))
        self._functions.hfs_exponential(of_state, address_of(values, torch.float32, values.shape), values.numel())

    def argmax(self, row: Float[Tensor, " V"]) -> int:
        """`Kernel.argmax` of `hf_speculate.verification`."""
        check_range("the length of a row", len(row), 1, 1 << 40)
        is_bf16 = row.dtype is torch.bfloat16
        address = address_of(row, torch.bfloat16 if is_bf16 else torch.float32, (len(row),))
        return self._functions.hfs_argmax(address, len(row), is_bf16)

    def most_probable(
        self, scores: Float[Tensor, "R N V"], count: int
    ) -> tuple[Float[Tensor, "R N K"], Int[Tensor, "R N K"]]:
        """`Kernel.most_probable` of `hf_speculate.verification`."""
        num_rows, num_nodes, width = scores.shape
        probs = torch.empty(num_rows, num_nodes, count, dtype=torch.float32, device="cpu")
        columns = torch.empty(num_rows, num_nodes, count, dtype=torch.long, device="cpu")
        check_range("the number of tokens", count, 1, width)
        is_bf16, between = scores.dtype is torch.bfloat16, scores.stride(1)
        inner = (between, 1) if num_rows == 1 else (num_nodes * between, between, 1)
        address = address_of_strided(scores, torch.bfloat16 if is_bf16 else torch.float32, scores.shape, inner)
        place = address, num_rows * num_nodes, between, width, is_bf16
        results = address_of(probs, torch.float32, probs.shape), address_of(columns, torch.long, probs.shape)
        self._functions.hfs_most_probable(*place, count, *results, torch.get_num_threads())
        return probs, columns

    def multiply(
        self,
        inputs: Float[Tensor, "M K"],
        tiles: UInt8[Tensor, "T bytes"],
        block_type: str,
        out_features: int,
        quantize: bool = False,
    ) -> Float[Tensor, "M N"]:
        """x @ w.T in the dtype of the inputs. With `quantize` these are quantised to 8 bits, in blocks of 32.

        Sums are float32. So are the inputs where the CPU cannot multiply bfloat16.
        """
        is_bf16 = inputs.dtype is torch.bfloat16
        dtype, (num_rows, in_features) = torch.bfloat16 if is_bf16 else torch.float32, inputs.shape
        values = (inputs if is_bf16 else inputs.float()).contiguous()
        products = torch.empty(num_rows, out_features, dtype=dtype, device="cpu")
        is_done = self._functions.hfs_multiply(
            self.kinds[block_type],
            self.address_of_tiles(tiles, block_type, in_features, out_features),
            in_features,
            out_features,
            address_of(values, dtype, (num_rows, in_features)),
            num_rows,
            address_of(products, dtype, (num_rows, out_features)),
            is_bf16,
            quantize,
            torch.get_num_threads(),
        )
        if not is_done:
            raise MemoryError(f"no memory to multiply {num_rows} rows of {in_features}")
        return products.to(inputs.dtype)


def _check_sizes(bytes_in_kernel: Callable[[bytes], int]) -> None:
    for name, structure in MIRRORED.items():
        size, expected = bytes_in_kernel(name.encode()), ctypes.sizeof(structure)
        if size != expected:
            raise NativeError(
                f"structure {name} has {size} bytes in the kernel and {expected} in Python ({structure.__name__} in "
                f"{structure.__module__}). Files of different versions are mixed: install hf_speculate again; after a "
                "change of your own, make the fields of both the same"
            )


@functools.cache
def native_problem() -> str:
    """The reason why there is no library; "" if there is one. Compiles and warns at most once in a process."""
    try:
        library()
    except NativeError as error:
        logger.warning(f"GGUF weights cannot be multiplied packed: {error}. `load_gguf` dequantises them")
        return str(error)
    return ""


@functools.cache
def has_kernel() -> bool:
    """Whether there is a library. Unlike `native_problem` this does not warn."""
    try:
        library()
    except NativeError as error:
        logger.info(f"no native kernel: {error}")
        return False
    return True


def needs_compiler() -> bool:
    """Whether the kernel would have to be compiled first, which takes a minute."""
    return not library.cache_info().currsize and KernelCache().find(_name()) is None


@functools.cache
def library() -> Library:
    """The library, compiled or from the cache; raises `NativeError`."""
    try:
        _share_threads()
        built = build()
    except (OSError, ValueError) as error:  # no temporary folder, no source, odd text in the environment
        raise NativeError(f"the kernel cannot be made: {error}") from error
    if not built.has_threads and torch.get_num_threads() > 1:
        raise NativeError("torch's threads cannot be used: its OpenMP library has no GOMP_parallel")
    if not all(stand_in(built)):
        logger.info("torch draws noise, chooses or ranks in another way here: the kernel leaves that to torch")
    return built


def build() -> Library:
    """The library, compiled if the cache has no usable one; raises `NativeError`."""
    cache, name = KernelCache(), _name()
    if path := cache.find(name):
        try:
            return Library(path)
        except (OSError, AttributeError) as error:  # made by another machine that shares the folder
            logger.info(f"{name} cannot be loaded here: {error}")
    compiler = find_compiler()
    if known := cache.problem:  # a minute before the compiler is done
        logger.warning(f"the kernel for GGUF weights: {known}.")
    with tempfile.TemporaryDirectory(prefix="hf_speculate-kernel-", ignore_cleanup_errors=True) as folder:
        path = Path(folder, name)
        compile_kernel(compiler, path)
        try:
            library = Library(path)
        except (OSError, AttributeError) as error:
            raise NativeError(f"what {shlex.join(compiler)} made of the kernel cannot be loaded: {error}") from error
        cache.keep(name, path.read_bytes())
    if cache.problem != known:
        logger.warning(f"the kernel for GGUF weights: {cache.problem}.")
    return library


def compile_kernel(compiler: Sequence[str], path: Path) -> None:
    """Compiles the files of `kernel/`, at the same time, to the shared library `path`; raises `NativeError`.

    A terminal shows that it runs. A log file gets a line before and a line after.
    """
    command, console, start = [*compiler, *_FLAGS, _tune()], Console(stderr=True), time.perf_counter()
    say = logger.info if console.is_terminal else logger.warning
    say(f"compiling the kernel for GGUF weights with {compiler[0]}: about a minute, while nothing is generated")
    with (
        tempfile.TemporaryDirectory(prefix="objects-", dir=path.parent) as folder,
        ThreadPoolExecutor() as pool,
        console.status("compiling the kernel for GGUF weights: about a minute, once on this machine"),
    ):
        sources = sorted(KERNEL.glob("*.cpp"), reverse=True)  # the one that takes longest comes first
        objects = [Path(folder, f"{source.stem}.o") for source in sources]
        commands = ([*command, "-c", str(source), "-o", str(to)] for source, to in zip(sources, objects, strict=True))
        for done, made in zip(pool.map(_run, commands), objects, strict=True):
            _check(done, made)
        _check(_run([*command, "-shared", *map(str, objects), "-o", str(path)]), path)
    say(f"compiled the kernel for GGUF weights in {time.perf_counter() - start:.0f} s")


def _check(done: subprocess.CompletedProcess[str], made: Path) -> None:
    command = shlex.join(done.args)
    if done.returncode:
        raise NativeError(f"{command} failed with status {done.returncode}:\n{done.stderr.strip()}")
    if not made.exists():
        raise NativeError(f"{command} reported success, but wrote nothing")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command with English output; bytes that are not UTF-8 are still shown."""
    options: dict[str, Any] = {"encoding": "utf-8", "errors": "replace", "timeout": 600}
    try:
        return subprocess.run(command, capture_output=True, env={**os.environ, "LC_ALL": "C"}, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"{shlex.join(command)}: {error}") from error


def find_compiler() -> list[str]:
    """The command that compiles C++; raises `NativeError`."""
    if chosen := os.environ.get("CXX", "").strip():
        try:
            command = shlex.split(chosen)
        except ValueError as error:
            raise NativeError(f"$CXX is not a command: {chosen!r} ({error})") from error
        if shutil.which(command[0]) is None:
            raise NativeError(f"there is no C++ compiler {command[0]!r} (from $CXX)")
        return command
    for name in _COMPILERS:
        if compiler := shutil.which(name):
            return [compiler]
    raise NativeError(f"there is no C++ compiler ($CXX, {', '.join(_COMPILERS)})")


def _name() -> str:
    """The name of libraries that work here."""
    sources = (path.read_text(encoding="utf-8") for path in sorted(KERNEL.iterdir()) if path.suffix in (".cpp", ".h"))
    parts = *sources, *_FLAGS, _tune(), _processor(), *platform.libc_ver()
    return f"kernel-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.so"


def _tune() -> str:
    return "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"


def _processor() -> str:
    """The processor, as far as -march=native may depend on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(fields)}))


def _share_threads() -> None:
    """Makes torch's OpenMP library visible to the kernel. With torch from PyPI it already is."""
    if os.name == "nt":  # there is no handle of everything that is loaded
        return
    if hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return
    try:
        loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    except OSError:
        return
    for path in sorted(loaded, key=lambda path: "torch" not in path)[:1]:
        ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
