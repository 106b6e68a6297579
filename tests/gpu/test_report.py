"""The GPU report without a GPU: it runs to its end, and outlives phases that fail, die or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from hf_speculate import Speculator
from hf_speculate.testing import RandomDrafter

from ..support.models import VOCAB_SIZE
from ..support.paths import REPOSITORY
from . import suite, supervisor, text, worker
from .attention import Case
from .profiling import _timeline
from .report import _parsed
from .setting import Setting, rounded
from .supervisor import SECONDS, Report
from .tables import markdown, summary
from .targets import TARGETS, judged
from .timing import Marks


PHASES = list(SECONDS)


def tables_of(text: str) -> list[list[list[str]]]:
    """The Markdown tables in a text: rows of cells, the line of dashes left out."""
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("| "):
            found[-1].append([cell.strip() for cell in line.strip("|").split(" | ")])
        elif found[-1]:
            found.append([])
    return [[rows[0], *rows[2:]] for rows in found if rows and set(rows[1]) == {"---"}]


@pytest.mark.rest
def test_report_runs_to_its_end_on_a_cpu(tmp_path):
    out = tmp_path / "report.jsonl"
    command = [
        sys.executable,
        "-m",
        "tests.gpu.report",
        "--tiny",
        "--device",
        "cpu",
        "--minutes",
        "5",
        "--out",
        str(out),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert out.read_text() == done.stdout
    lines = done.stdout.splitlines()
    findings = [json.loads(line) for line in lines[:-1] if line.startswith("{")]
    assert not [each for each in findings if "error" in each or "left_out" in each]
    for phase in PHASES:
        said = [each for each in findings if each["phase"] == phase and not {"begun", "done"} & each.keys()]
        assert said, f"{phase} found nothing"
    last = json.loads(lines[-1])
    assert (last["report"], last["num_errors"], list(last["seconds"])) == ("gpu", 0, PHASES)
    targets, speed, rounds, attention = tables_of(done.stdout)
    assert targets[0] == ["target", "place", "wanted", "found", "met"]
    assert {row[0] for row in targets[1:]} == {target.name for target in TARGETS}
    assert all(row[3] != "not measured" for row in targets[1:])
    assert {row[0] for row in speed[1:]} >= {
        "0.5B",
        "8B",
        "8B with a head",
        "8B, 8k context",
        "pycoder",
        "0.5B, batch 8",
    }
    assert all(row[-1] == "yes" for row in speed[1:])
    assert [row[0] for row in rounds[1:]] == ["eager", "recorded"]
    assert len(attention) == 5


@pytest.fixture
def report(monkeypatch):
    """Maker of a report whose worker is a script: it gets the names of the phases and `say`."""
    monkeypatch.setattr(supervisor, "_LATE_SECONDS", 0.5)

    def make(phases, script, minutes=0.1):
        found = Report(phases, minutes, "cpu", True, None)

        def process(request, log, descriptors=()):
            names = json.dumps([phase[0] for phase in request["phases"]])
            prelude = f"import json, os, sys, time\nfile = os.fdopen({request['lines']}, 'w', buffering=1)\n"
            prelude += "def say(**finding): file.write(json.dumps(finding) + '\\n')\n"
            return subprocess.Popen(
                [sys.executable, "-c", f"{prelude}for name in {names}:\n{script}"],
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=tuple(descriptors),
                start_new_session=True,
            )

        monkeypatch.setattr(found, "_process", process)
        found.run()
        return found.findings

    return make


DIES = """
    say(phase=name, begun=True)
    if name == "text": sys.exit("out of luck")
    say(phase=name, done=True, seconds=1.0)
"""
HANGS = DIES.replace('sys.exit("out of luck")', "time.sleep(60)")


def test_a_phase_whose_process_dies_is_left_and_the_others_run(report):
    findings = report(["env", "text", "speed"], DIES)
    assert [each["phase"] for each in findings] == ["env", "env", "text", "text", "speed", "speed"]
    assert findings[3]["error"] == "its process died"
    assert "out of luck" in findings[3]["log"]
    assert findings[5]["done"]


def test_a_phase_that_hangs_is_ended_and_the_others_run(report):
    start = time.monotonic()
    findings = report(["env", "text", "speed"], HANGS, minutes=0.02)
    assert time.monotonic() - start < 20
    assert [each["phase"] for each in findings] == ["env", "env", "text", "text", "speed", "speed"]
    assert findings[3]["error"].startswith("ended by force")


def test_report_ends_at_once_without_a_device(report):
    script = """
    say(phase=name, error="no driver", device_lost=True)
    say(phase=name, done=True, seconds=1.0)
    sys.exit(17)
"""
    assert [each["phase"] for each in report(["env", "text"], script)] == ["env", "env"]


def test_after_an_error_of_the_device_the_next_phase_gets_a_new_process(report):
    script = """
    say(phase=name, done=True, seconds=1.0, process=os.getpid())
    if name == "text": sys.exit(17)
"""
    findings = report(["env", "text", "speed"], script)
    assert [each["phase"] for each in findings] == ["env", "text", "speed"]
    assert not [each for each in findings if "error" in each]
    assert findings[0]["process"] == findings[1]["process"] != findings[2]["process"]


def test_a_process_that_cannot_start_ends_every_phase(report):
    findings = report(["env", "text"], "\n    sys.exit('no module')\n")
    assert [each["error"] for each in findings] == ["its process died before it began"] * 2


def test_run_phase_records_errors(monkeypatch):
    def measure(setting):
        with setting.guarded(cell="first"):
            raise ValueError("one line\nanother")
        raise RuntimeError("no")

    monkeypatch.setattr(worker.importlib, "import_module", lambda *_: SimpleNamespace(measure=measure))
    found = []
    status = worker.run_phase(Setting("text", torch.device("cpu"), True, time.monotonic() + 1, found.append))
    assert status == 0
    assert all(each.pop("trace")[-1].endswith(" measure") for each in found)
    assert found == [
        {"phase": "text", "cell": "first", "error": "ValueError: one line"},
        {"phase": "text", "error": "RuntimeError: no"},
    ]


def test_phases_are_chosen_and_env_always_runs():
    assert _parsed(["--phases", "speed,rounds"]).phases == ["env", "rounds", "speed"]
    with pytest.raises(SystemExit):
        _parsed(["--phases", "speeed"])


def row(cell, way, **figures):
    return {"phase": "speed", "cell": cell, "way": way, "tokens_per_second": 1.0, "same_text": True, **figures}


def test_targets_are_judged_by_the_rows_of_speed():
    findings = [
        row("8B", "eager, 16 nodes", x_eager=0.9, tokens_per_round=3.0),
        row("8B", "recorded, 16 nodes", x_static=2.5, x_eager=4.0, ms_per_round=12.5, host_ms={"drafter": 0.5}),
        row("8B", "recorded, nothing drafted", x_static=0.99, ms_per_round=10.0),
        row("8B with a head", "recorded, 16 nodes", ms_per_round=12.0),
        row("8B with a head", "recorded, 16 nodes and a head", ms_per_round=14.0),
        row("8B with a head", "recorded, nothing drafted", ms_per_round=10.0),
    ]
    found = {each["target"]: (each["place"], each["found"], each["met"]) for each in judged(findings)}
    assert found == {
        "eager over HF eager, where a round yields 2 tokens or more": ("8B, 16 nodes", "0.9x", False),
        "recorded over HF static + compile": ("8B, 16 nodes", "2.5x", True),
        "recorded over HF eager": ("8B, 16 nodes", "4x", False),
        "round without its draft / plain step": ("8B", "1.2", True),
        "draft of a head of one layer / plain step": ("8B", "0.2", False),
        "nothing drafted over HF static + compile": ("8B, nothing drafted", "0.99x", True),
        "additional time of the first recorded call": ("", None, None),
        "recorded over HF static + compile, batch 8": ("", None, None),
        "round / plain step after 8192 tokens": ("", None, None),
    }
    targets, speed = tables_of(markdown(findings))
    assert ["recorded over HF eager", "8B, 16 nodes", ">= 5x", "4x", "no"] in targets
    assert len(speed) == 1 + len(findings)


def test_the_last_line_names_errors_and_where_they_were():
    findings = [{"phase": "speed", "cell": "8B", "way": "HF eager", "error": "OutOfMemoryError: x"}]
    found = summary(findings)
    assert found["errors"] == ["speed, 8B, HF eager: OutOfMemoryError: x"]
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("size", [1, 3])
def test_a_text_that_differs_is_an_error(tiny_model, prompt, size):
    model, ids = tiny_model("llama"), torch.cat([prompt(9, seed=seed) for seed in range(size)])
    arguments = {"max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0, "do_sample": True, "temperature": 0.8}
    case = text.Case.of("tiny", model, ids, torch.ones_like(ids), arguments)
    drafter = RandomDrafter(vocab_size=VOCAB_SIZE, max_nodes=12)
    right = case.compare(Speculator(drafter))
    assert right == {"rows": size, "equal": size, "rng_equal": True}
    lossy = Speculator(drafter, acceptance="typical", posterior_threshold=1e-9, posterior_alpha=1e-9)
    wrong = case.compare(lossy)
    assert wrong["equal"] < size
    assert "tie" in wrong["error"]


def event(kind, name, start, end):
    return SimpleNamespace(
        device_type=f"DeviceType.{kind}", name=name, time_range=SimpleNamespace(start=start, end=end)
    )


def test_timeline_names_the_host_call_in_each_gap():
    events = [
        event("CUDA", "flash_fwd_kernel", 0.0, 10.0),
        event("CUDA", "gemm", 5.0, 20.0),
        event("CUDA", "cudnn_sdpa", 1020.0, 1030.0),
        event("CUDA", "gemm", 1040.0, 1050.0),
        event("CPU", "generate", 0.0, 2000.0),
        event("CPU", "aten::sdpa", 30.0, 1010.0),
    ]
    found = _timeline(events)
    assert (found["kernels"], found["busy_ms"], found["span_ms"]) == (4, 0.04, 1.05)
    assert found["gaps"] == [
        {"ms": 1.0, "host": "aten::sdpa", "then": "cudnn_sdpa"},
        {"ms": 0.01, "host": "generate", "then": "gemm"},
    ]
    assert found["attention"] == {"flash": 1, "cudnn": 1}


def test_ways_of_attention_agree():
    case = Case((4, 2, 16), 24, 5, 1, torch.device("cpu"), torch.float32)
    expected = case.expected()
    for found in (case.stock(0), case.folded(0)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not case.ancestors[0, 1, 2]  # siblings


def test_marks_sum_the_times_of_a_part():
    marks = Marks(torch.device("cpu"))
    for _ in range(2):
        with marks.part("draft"):
            time.sleep(0.01)
    assert marks.counts() == {"draft": 2}
    assert marks.milliseconds()["draft"] >= 20


def test_lines_have_few_digits_and_no_nan():
    assert rounded({"a": [1.23456, float("nan")], 2: 7}) == {"a": [1.235, "nan"], "2": 7}


def test_modules_with_gpu_tests_are_found():
    assert "tests/attention/test_grouped_sdpa.py" in suite.modules()


def test_failures_are_read_from_the_results(tmp_path):
    results = tmp_path / "results.xml"
    failed = '<testcase classname="tests.a" name="test_b"><failure message="assert 1 == 2&#10; more"/></testcase>'
    cause = "E   ModuleNotFoundError: No module named 'x'"
    broken = f'<testcase classname="" name="tests.c"><error message="collection failure">x\n{cause}</error></testcase>'
    results.write_text(f"<testsuites><testsuite>{failed}{broken}</testsuite></testsuites>")
    assert suite._failures(results) == {
        "tests.a::test_b": ("assert 1 == 2", ["assert 1 == 2\n more"]),
        "tests.c": ("ModuleNotFoundError: No module named 'x'", ["collection failure", "x", cause]),
    }
