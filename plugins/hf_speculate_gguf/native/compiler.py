"""Finds a C++ compiler and compiles `kernel/` to a shared library for the CPU at hand.

The compiler is `$CXX`, else the first of g++, clang++ and c++ that is found, else that of the package `ziglang`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console  # noqa: TID251  (for words of our own)

from hf_speculate.errors import SpeculateError
from hf_speculate.messages import get_logger


logger = get_logger(__name__)

KERNEL = Path(__file__).parent / "kernel"

# g++ for Windows stores vectors of 32 bytes at addresses that are not multiples of 32 (GCC's bug 54412), and clang++
# there exports nothing.
_COMPILERS = () if os.name == "nt" else ("g++", "clang++", "c++")
_ZIGLANG = (sys.executable, "-m", "ziglang", "c++")

# Contraction is g++'s default. clang++ needs it to multiply and add at once in the same places, for the same bits.
# GCC's first pass of scheduling, which x86 does without, spills registers of products on ARM.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-exceptions", "-fPIC", "-w", "-fno-schedule-insns")

_SUFFIXES = {"win32": ".dll", "darwin": ".dylib"}


class NativeError(SpeculateError):
    """The library cannot be compiled or loaded; the message has the reason and the compiler's output."""


def find_compiler() -> list[str]:
    """The command that compiles C++; raises `NativeError`."""
    if chosen := os.environ.get("CXX", "").strip():
        try:
            command = shlex.split(chosen, posix=os.name != "nt")
        except ValueError as error:
            raise NativeError(f"$CXX is not a command: {chosen!r} ({error})") from error
        if shutil.which(command[0]) is None:
            raise NativeError(f"there is no C++ compiler {command[0]!r} (from $CXX)")
        return command
    for name in _COMPILERS:
        if compiler := shutil.which(name):
            return [compiler]
    if importlib.util.find_spec("ziglang"):
        return [*_ZIGLANG]
    raise NativeError(
        f"there is no C++ compiler ({', '.join(('$CXX', *_COMPILERS))}). `pip install ziglang` (100 MB) brings one"
    )


def compile_kernel(compiler: Sequence[str], path: Path, tune: str | None = None) -> None:
    """Compiles the files of `kernel/`, at the same time, to the shared library `path`; raises `NativeError`.

    A terminal shows that it runs. A log file gets a line before and a line after.

    Args:
        tune: flag that names the CPU to compile for; None: the CPU at hand.
    """
    command, console, start = [*compiler, *_FLAGS, tune or _tune()], Console(stderr=True), time.perf_counter()
    say = logger.info if console.is_terminal else logger.warning
    say(
        f"compiling the kernel for GGUF weights with {shlex.join(compiler)}: about a minute, while nothing is generated"
    )
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
        # The kernel uses nothing of the C++ library, which ziglang would have to compile: a minute and a half.
        command += ["-nostdlib++"] if "ziglang" in compiler else []
        _check(_run([*command, "-shared", *map(str, objects), "-o", str(path)]), path)
    say(f"compiled the kernel for GGUF weights in {time.perf_counter() - start:.0f} s")


def library_name() -> str:
    """The name of libraries that work here, with a hash of source, flags and CPU."""
    sources = (path.read_text(encoding="utf-8") for path in sorted(KERNEL.iterdir()) if path.suffix in (".cpp", ".h"))
    parts = *sources, *_FLAGS, _tune(), _processor(), *platform.libc_ver()
    digest = hashlib.sha256(chr(0).join(parts).encode()).hexdigest()
    return f"kernel-{digest[:24]}{_SUFFIXES.get(sys.platform, '.so')}"


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
