"""The instructions that compilers make of the kernel."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections import Counter

import pytest

from hf_speculate_gguf.native import compiler


# An instruction that moves or converts a single lane.
LANE = re.compile(r"v?(pinsr[bwd]|pextr[bwd]|insertps|extractps|cvtsi2s[sd]l?|cvttss2sil?)")

# Functions that need such instructions, by what they are for.
GATHERS, CONVERTS_64_BITS, RETURNS_LANES = "convolve", "draw_exponential", "most_probable|hfs_argmax|rank_row"


def lanes_of_functions(library: str) -> Counter[str]:
    """The number of such instructions in each function of a library."""
    counts, function = Counter(), ""
    listing = subprocess.run(
        ["objdump", "-d", "-C", "--no-show-raw-insn", library], capture_output=True, text=True, check=True
    )
    for line in listing.stdout.splitlines():
        if named := re.match(r"[0-9a-f]+ <(.*)>:", line):
            function = named[1].replace("(anonymous namespace)::", "")
        elif (parts := line.split("\t"))[1:] and LANE.fullmatch(parts[1].split()[0]):
            counts[function] += 1
    return counts


@pytest.mark.rest
@pytest.mark.usefixtures("needs_kernel")
@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="looks at AVX2")
@pytest.mark.skipif(not shutil.which("objdump"), reason="binutils are not installed")
def test_code_for_avx2_computes_no_vector_lane_by_lane(tmp_path):
    """GCC converts and chooses lane by lane in vectors that are wider than the CPU's: a seventh of a forward."""
    compiler.compile_kernel(compiler.find_compiler(), library := tmp_path / "kernel.so", "-march=haswell")
    allowed = re.compile(f"{GATHERS}|{CONVERTS_64_BITS}|{RETURNS_LANES}")
    counts = lanes_of_functions(str(library))
    assert counts  # the listing was read
    assert {name: count for name, count in counts.items() if count > 4 and not allowed.search(name)} == {}
