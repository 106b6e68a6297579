"""The kernel on ARM, cross-compiled and run by an emulator (`make arm`): the bits of x86, by vector instructions."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hf_speculate_gguf.native import compiler

from ..support.paths import REPOSITORY


CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
MISSING = [tool for tool in (CROSS, EMULATOR) if shutil.which(tool) is None]
PROGRAM = REPOSITORY / "tests" / "native" / "kernel_bits.cpp"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not found: run `make arm` to install them"),
]

# CPUs that are compiled for, the emulated CPU, and the instruction that multiplies bytes there.
CPUS = {"neoverse-v1": ("max", "smmla"), "neoverse-n1": ("max", "sdot"), "cortex-a72": ("cortex-a72", "smull")}

# Functions whose instructions are looked at.
PROBES = """
#include "packed.h"
extern "C" {
void probe_widen(const uint16_t* from, float* to) { store(to, widen(from)); }
void probe_narrow(uint16_t* to, const float* from) { narrow(to, load<Floats>(from)); }
void probe_widen_bytes(const uint8_t* from, float* to) { store(to, widen_bytes(from)); }
void probe_widen_halves(const uint8_t* from, float* to) { store(to, widen_halves(from)); }
void probe_exponential(const float* from, float* to) { store(to, exponential(load<Floats>(from))); }
void probe_choice(const float* from, float* to) {
  const Floats a = load<Floats>(from), b = load<Floats>(to);
  store(to, choose(a > b, a, b));
}
void probe_transpose(Words* rows) { transpose(rows); }
void probe_look_up(Words* codes) { *codes = look_up(*codes); }
void probe_codes(Q6_K::Codes* codes, float* to) { store(to, codes->at(1, float())); }
extern void (*const probe_products)(const Stretch&, const QuantizedRows&, int64_t, float*);
void (*const probe_products)(const Stretch&, const QuantizedRows&, int64_t, float*) = multiply_few<8, Q4_0>;
}
"""

# Instructions on one lane: conversions, comparisons and arithmetic of scalars, and moves of lanes.
SCALAR = re.compile(
    r"(f(?!mov)\w+|[su]cvtf)\s+[sdh]\d|(ldrh|ldrb|strh|strb|[us]mov|ins)\s|mov\s+(v\d+\.\w\[|[wx]\d+, v)"
)


def compile_object(command: Sequence[str], source: Path, made: Path) -> Path:
    done = subprocess.run(
        [*command, *compiler._FLAGS, f"-I{compiler.KERNEL}", "-c", str(source), "-o", str(made)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return made


@pytest.fixture(scope="module")
def print_bits(tmp_path_factory) -> Callable[..., list[str]]:
    """Compiles `kernel_bits.cpp` with a command and runs it; returns its lines."""

    def build_and_run(command: Sequence[str], emulator: Sequence[str] = ()) -> list[str]:
        folder = tmp_path_factory.mktemp("bits")
        sources = [PROGRAM, compiler.KERNEL / "blocks.cpp", compiler.KERNEL / "super_blocks.cpp"]
        with ThreadPoolExecutor() as pool:
            objects = pool.map(lambda source: compile_object(command, source, folder / f"{source.stem}.o"), sources)
            program = folder / "bits"
            subprocess.run([*command, *map(str, objects), "-static", "-o", str(program)], check=True)
        return subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=True).stdout.splitlines()

    return build_and_run


@pytest.fixture(scope="module")
def expected_bits(print_bits) -> list[str]:
    """The lines of x86. Without its own instructions x86 sums dense products in the same order as ARM."""
    if platform.machine() != "x86_64":
        pytest.skip("this machine is not an x86-64, with which ARM is compared")
    return print_bits(["g++", "-march=native", "-DHFS_PORTABLE"])


@pytest.mark.parametrize("cpu", CPUS)
def test_arm_computes_the_bits_of_x86(cpu, print_bits, expected_bits):
    """Products of every type, 1 to 33 rows, non-finite ones too; exp, norms, attention; requests of small models."""
    emulated, _ = CPUS[cpu]
    assert print_bits([CROSS, f"-mcpu={cpu}"], [EMULATOR, "-cpu", emulated]) == expected_bits
    assert not [line for line in expected_bits if "differ" in line]


def test_quantised_rows_have_the_same_bits_by_all_instructions_of_x86(print_bits, expected_bits):
    """So ARM has these bits, too: the other test compares it with x86 without instructions of its own."""
    own = print_bits(["g++", "-march=native"])
    integers = [line for line in expected_bits if line.startswith(("products", "quantised")) and "quantised" in line]
    assert len(integers) == 26
    assert not set(integers) - set(own)


@pytest.fixture(scope="module")
def instructions(tmp_path_factory) -> Callable[[str], dict[str, list[str]]]:
    """Compiles `PROBES` for a CPU; returns the instructions of each function."""
    folder = tmp_path_factory.mktemp("probes")
    source = folder / "probes.cpp"
    source.write_text(PROBES)

    def disassemble(cpu: str) -> dict[str, list[str]]:
        made = compile_object([CROSS, f"-mcpu={cpu}"], source, folder / f"{cpu}.o")
        command = ["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", str(made)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        functions = re.findall(r"<(\S+)>:\n(.*?)\n(?:\n|$)", text, re.DOTALL)
        return {name: [line.split("\t", 1)[1] for line in body.splitlines()] for name, body in functions}

    return disassemble


@pytest.mark.parametrize("cpu", CPUS)
def test_vectors_are_computed_whole(cpu, instructions):
    """GCC does not compute them lane by lane, as it does where it cannot split a vector of sixteen lanes."""
    functions = {name: body for name, body in instructions(cpu).items() if name.startswith("probe_")}
    scalar = {name: [line for line in body if SCALAR.match(line)] for name, body in functions.items()}
    assert len(functions) == 9
    assert not any(scalar.values()), scalar
    assert max(map(len, functions.values())) < 300  # a transposition lane by lane takes 1200 moves of general registers


@pytest.mark.parametrize("cpu", CPUS)
def test_products_of_bytes_use_the_instructions_of_the_cpu_and_few_others(cpu, instructions):
    """Eight rows of Q4_0: 512 weights take 128 smmla, 256 sdot, or 512 smull (with smull2)."""
    _, instruction = CPUS[cpu]
    (products,) = (body for name, body in instructions(cpu).items() if "multiply_few" in name)
    multiplied = [line for line in products if line.startswith(instruction)]
    assert len(multiplied) == {"smmla": 128, "sdot": 256, "smull": 512}[instruction]
    assert len(products) < {"smmla": 800, "sdot": 900, "smull": 2200}[instruction]
