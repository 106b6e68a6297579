"""Other engines, which answer from processes of their own."""

from __future__ import annotations

import stat
import sys

import pytest
import torch

from hf_speculate.errors import SpeculateError

from ..benchmarks.engines import LLAMA_CPP, OtherEngine, engine_methods
from ..benchmarks.gguf import OPENVINO, GgufSettings, bench_gguf, tables
from ..support.random_gguf import FileShape, one_type, write_random_file


# What stands in for llama-cpp-python and its worker.
_FAKE = """#!{python}
import json, sys

assert sys.argv[1] == "-c" and "llama_cpp" in sys.argv[2] and sys.argv[3].endswith(".gguf")
print(json.dumps({{"version": "0.0.fake"}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    assert all(isinstance(token, int) for token in request["prompt"])
    assert len(request["prompt"]) + request["max_new_tokens"] <= int(sys.argv[5])
    print(json.dumps({{"num_tokens": request["max_new_tokens"] - {missing}}}), flush=True)
"""


# What stands in for openvino-genai.
_FAKE_OPENVINO = """#!{python}
import sys, types

class Pipeline:
    def __init__(self, path, device, **options):
        assert path.endswith(".gguf") and device == "CPU" and options.pop("INFERENCE_NUM_THREADS") > 0
        assert options in ({{}}, {{"prompt_lookup": True}})
        self.looks_up = bool(options)
        print("something that OpenVINO says")

    def generate(self, prompt, config):
        assert prompt.ndim == 2 and prompt.dtype == "int64"
        assert config.ignore_eos and not config.apply_chat_template
        assert not hasattr(config, "do_sample") or config.temperature == 1.0
        assert hasattr(config, "num_assistant_tokens") == self.looks_up
        return types.SimpleNamespace(tokens=[[7] * (config.max_new_tokens - {missing})])

sys.modules["openvino"] = types.SimpleNamespace(Tensor=lambda array: array)
sys.modules["openvino_genai"] = types.SimpleNamespace(
    __version__="0.0.fake", LLMPipeline=Pipeline, GenerationConfig=types.SimpleNamespace
)
assert sys.argv[1] == "-c"
code, sys.argv = sys.argv[2], ["-c", *sys.argv[3:]]
exec(code)
"""


@pytest.fixture
def interpreter(tmp_path):
    """Writes a program that is run in the place of a Python with an engine; returns its path."""

    def _write(code: str, **values) -> str:
        path = tmp_path / "python"
        path.write_text(code.format(python=sys.executable, **values))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return _write


class TestEngines:
    @pytest.fixture
    def settings(self, tmp_path):
        path = tmp_path / "tiny.gguf"
        write_random_file(str(path), FileShape("llama", 96, 64, 64, 2, 4, 2, 256, is_tied=False), one_type("Q8_0"))
        return GgufSettings(file=path, backend="dequantize", nodes=[4], context=8, max_new_tokens=6, repeats=1)

    def test_llama_cpp_is_measured_beside_us(self, settings, interpreter):
        settings.llama_cpp = interpreter(_FAKE, missing=0)
        result = bench_gguf(settings)
        rows = {row["method"]: row for row in result["rows"]}
        assert rows.keys() >= LLAMA_CPP.methods.keys()
        ours, other = (rows[name]["tokens_per_second"]["median"] for name in ("packed, plain", "llama.cpp"))
        assert rows["packed, plain"]["speedup"]["llama.cpp"] == pytest.approx(ours / other)
        assert "x llama.cpp" in tables(result)[0].columns

    def test_openvino_answers_with_tokens(self, interpreter):
        for kind in OPENVINO.methods.values():
            with OtherEngine(OPENVINO, interpreter(_FAKE_OPENVINO, missing=0), "x.gguf", 2, 8, kind) as engine:
                found = engine.generate(torch.tensor([[4, 5]]), max_new_tokens=3, do_sample=True, temperature=1.0)
                assert found.sequences.tolist() == [[4, 5, -1, -1, -1]]

    def test_bench_gguf_refuses_engines_that_emit_fewer_tokens(self, settings, interpreter):
        settings.llama_cpp = interpreter(_FAKE, missing=1)
        with pytest.raises(SpeculateError, match=r"llama.cpp emitted \[5\] tokens instead of 6"):
            bench_gguf(settings)

    def test_other_targets_than_gguf_files_are_refused(self):
        with (
            pytest.raises(SpeculateError, match="--llama-cpp runs GGUF files; the target is a/folder"),
            engine_methods({LLAMA_CPP: "python"}, "a/folder", 8),
        ):
            pass

    def test_other_engine_reports_the_reason_of_a_failed_process(self, interpreter):
        with pytest.raises(SpeculateError, match="--openvino no-such-python"):
            OtherEngine(OPENVINO, "no-such-python", "x.gguf", 1, 64)
        failing = interpreter("#!{python}\nimport sys\nprint('no such model', file=sys.stderr)\nsys.exit(3)")
        with pytest.raises(SpeculateError, match=r"OpenVINO ended \(status 3\): no such model"):
            OtherEngine(OPENVINO, failing, "x", 1, 64)
        dying = interpreter('#!{python}\nimport os\nprint(\'{{"version": "1"}}\', flush=True)\ninput()\nos.abort()')
        with (
            OtherEngine(LLAMA_CPP, dying, "x.gguf", 1, 64) as other,
            pytest.raises(SpeculateError, match=r"ended \(SIGABRT\)"),
        ):
            other.generate(torch.tensor([[1]]), max_new_tokens=2)
