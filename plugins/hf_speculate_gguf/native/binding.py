"""Loads the kernel, compiled at first use (`compiler`) and kept in the user's cache (`kernel_cache`), and calls it.

A library's name has a hash of source, flags and CPU, so machines can share a folder. A library that is in the cache
needs no compiler.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from hf_speculate.messages import get_logger
from hf_speculate.verification import stand_in

from .compiler import NativeError, compile_kernel, find_compiler, library_name
from .formats import FORMATS
from .kernel_cache import KernelCache
from .memory import address_of, address_of_strided, address_of_table, check_range


logger = get_logger(__name__)

# Number of rows that are packed together, and of columns that are multiplied at a time.
TILE_ROWS, TILE_COLUMNS = 16, 32

# The kernel's names for matrices that are not packed.
DENSE_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16"}

# Bytes of the part of a generator's state that the kernel reads and writes (its Twister).
_TWISTER_BYTES = 5016

# Functions of OpenMP libraries. On Windows there is no GOMP_parallel; the next three do the same.
_OPENMP = (
    *("GOMP_parallel", "__kmpc_fork_call", "__kmpc_push_num_threads", "__kmpc_global_thread_num"),
    *("omp_get_num_threads", "omp_set_num_threads", "omp_pause_resource_all"),
)

_INT, _SIZE, _POINTER, _FLAG = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_bool
# Functions of `kernel/kernel.cpp`, with the types of their results and arguments.
FUNCTIONS = (
    ("hfs_sizeof", _SIZE, (ctypes.c_char_p,)),
    ("hfs_kind", _INT, (ctypes.c_char_p,)),
    ("hfs_use_openmp", _FLAG, (_POINTER,)),
    ("hfs_thread_pool_size", _INT, (_INT,)),
    ("hfs_set_threads", None, (_INT, _INT)),
    ("hfs_bytes", _FLAG, ()),
    ("hfs_tile_bytes", _SIZE, (_INT, _SIZE)),
    ("hfs_large_pages", None, (_POINTER, _SIZE)),
    ("hfs_pack", _FLAG, (_INT, _POINTER, _SIZE, _SIZE, _POINTER, _INT)),
    ("hfs_multiply", _FLAG, (_INT, _POINTER, _SIZE, _SIZE, _POINTER, _SIZE, _POINTER, _FLAG, _FLAG, _INT)),
    ("hfs_ranges_of_mask", _SIZE, (_POINTER, _INT, *[_SIZE] * 6, _FLAG, _POINTER, _POINTER, _SIZE)),
    ("hfs_exponential", None, (_POINTER, _POINTER, _SIZE)),
    ("hfs_argmax", _SIZE, (_POINTER, _SIZE, _FLAG)),
    ("hfs_most_probable", None, (_POINTER, _SIZE, _SIZE, _SIZE, _FLAG, _SIZE, _POINTER, _POINTER, _INT)),
    ("hfs_layers", _FLAG, (_POINTER,)),
    ("hfs_move", None, (_POINTER, _SIZE, _POINTER, _POINTER, _SIZE)),
    ("hfs_step", _INT, (_POINTER,)),
    ("hfs_delta", _FLAG, (_POINTER,)),
    ("hfs_attend", _FLAG, (_POINTER,)),
    ("hfs_cut", _FLAG, (_POINTER, _SIZE, _POINTER, _POINTER, _POINTER)),
    ("hfs_draft", _INT, (_POINTER,)),
)

# The kernel's structures that Python fills, by their names there (`mirrors`).
MIRRORED: dict[str, type[ctypes.Structure]] = {}

Mirror = TypeVar("Mirror", bound=type[ctypes.Structure])


def mirrors(name: str) -> Callable[[Mirror], Mirror]:
    """Marks a ctypes structure as the copy of the kernel's structure `name`; `Library` compares their sizes."""

    def add(structure: Mirror) -> Mirror:
        MIRRORED[name] = structure
        return structure

    return add


@mirrors("OpenMP")
class OpenMP(ctypes.Structure):
    """Addresses of the functions of an OpenMP library, on whose threads the kernel computes; None: it has no such."""

    _fields_ = [(name, ctypes.c_void_p) for name in _OPENMP]


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
        for name, result, arguments in FUNCTIONS:
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
        self.has_threads: bool = functions.hfs_use_openmp(ctypes.byref(find_openmp()))

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
    return not library.cache_info().currsize and KernelCache().find(library_name()) is None


@functools.cache
def library() -> Library:
    """The library, compiled or from the cache; raises `NativeError`."""
    try:
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
    cache, name = KernelCache(), library_name()
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


def find_openmp() -> OpenMP:
    """The functions of torch's OpenMP library."""
    library = _openmp_library()
    functions = (getattr(library, name, None) for name in _OPENMP)
    return OpenMP(*(function and ctypes.cast(function, ctypes.c_void_p) for function in functions))


def _openmp_library() -> ctypes.CDLL | None:
    """The OpenMP library that torch has loaded; None if it is not found."""
    if os.name != "nt":  # there is no handle of everything that is loaded
        everything = ctypes.CDLL(None)
        if hasattr(everything, "GOMP_parallel"):  # always so with torch from PyPI for Linux
            return everything
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        maps = []
    loaded = sorted({line.split()[-1] for line in maps if "libgomp" in line}, key=lambda path: "torch" not in path)
    of_torch = (Path(torch.__file__).with_name("lib") / name for name in ("libomp.dylib", "libiomp5md.dll"))
    for path in (*loaded, *(str(path) for path in of_torch if path.is_file())):
        return ctypes.CDLL(path)
    return None
