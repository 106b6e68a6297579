"""`hf-speculate bench gguf`: what is measured is in the tables; llama.cpp answers from another process."""

from __future__ import annotations

import stat
import sys

import pytest
import torch

from hf_speculate.bench import GgufSettings, bench_gguf
from hf_speculate.bench.gguf import tables
from hf_speculate.bench.llamacpp import LlamaCpp
from hf_speculate.errors import SpeculateError
from hf_speculate.gguf.random_files import FileShape, one_type, write_random_file


_FAKE = """#!{python}
import json, sys
assert sys.argv[1] == "-c" and "import llama_cpp" in sys.argv[2]
print(json.dumps({{"version": "0.0.fake", "threads": sys.argv[4]}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["command"] == "verify":
        print(json.dumps({{"seconds": [[n / 1000] * request["repeats"] for n in request["nodes"]]}}), flush=True)
    else:
        tokens = [7] * request["max_new_tokens"]
        print(json.dumps({{"seconds": 2.0, "prompt_seconds": 0.5, "tokens": tokens}}), flush=True)
"""


@pytest.fixture
def interpreter(tmp_path):
    """Writes a program that is run in the place of a Python with llama_cpp; returns its path."""

    def _write(code: str) -> str:
        path = tmp_path / "python"
        path.write_text(code.format(python=sys.executable))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return _write


def test_packed_beside_dequantised_and_llama_cpp(tmp_path, interpreter):
    path = tmp_path / "tiny.gguf"
    write_random_file(str(path), FileShape("llama", 96, 64, 64, 2, 4, 2, 256, is_tied=False), one_type("Q8_0"))
    settings = GgufSettings(
        file=path,
        backend="dequantize",
        nodes=[4],
        acceptance="1,1,1",
        context=8,
        max_new_tokens=9,
        repeats=1,
        llama_cpp=interpreter(_FAKE),
    )
    result = bench_gguf(settings)
    rows = {row["method"]: row for row in result["rows"]}
    assert list(rows) == [
        "dequantised, plain",
        "dequantised, trees of 4",
        "packed, plain",
        "packed, trees of 4",
        "llama.cpp, plain",
    ]
    plain = ["dequantised, plain", "packed, plain", "llama.cpp, plain"]
    for row in rows.values():
        rate = row["tokens_per_second"]["median"]
        for name in plain:
            assert row["speedup"][name] == pytest.approx(rate / rows[name]["tokens_per_second"]["median"])
    # Right at every level: eight tokens in two rounds, each model drafted for from its own text.
    for name in ("dequantised, trees of 4", "packed, trees of 4"):
        assert rows[name]["speculation"]["mean_acceptance_length"] == 4
    assert result["forward"]["llama.cpp"] == {"verify_ms": {n: n for n in (1, 4, 8, 16, 32)}, "prompt_ms": 500}
    assert result["llama_cpp"] == "0.0.fake"
    speed, forward, memory = tables(result)
    assert [row[0] for row in speed.rows] == list(rows)
    assert [row[0] for row in forward.rows] == ["packed", "dequantised", "llama.cpp"]
    assert "dequantize, rows" in memory


def test_a_llama_cpp_that_fails_says_why(interpreter):
    with pytest.raises(SpeculateError, match="no-such-python"):
        LlamaCpp("no-such-python", "x.gguf", 1, 64)
    with pytest.raises(SpeculateError, match=r"ended \(status 3\): no such model"):
        LlamaCpp(
            interpreter("#!{python}\nimport sys\nprint('no such model', file=sys.stderr)\nsys.exit(3)"), "x", 1, 64
        )
    dying = interpreter('#!{python}\nimport os, signal\nprint(\'{{"version": "1"}}\', flush=True)\ninput()\nos.abort()')
    with LlamaCpp(dying, "x.gguf", 1, 64) as other, pytest.raises(SpeculateError, match=r"ended \(SIGABRT\)"):
        other.generate(torch.tensor([[1]]), max_new_tokens=2)


def test_trees_have_a_node_beside_the_root():
    with pytest.raises(SpeculateError, match="at least one node, got 1"):
        bench_gguf(GgufSettings(nodes=[1]))
