"""Answers by Ray's actors: those of one process, each once, whoever dies in the middle."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from hf_speculate_training.data import load_records
from hf_speculate_training.regenerate import Planner, RegenerateOptions, regenerate, write_answers
from hf_speculate_training.regenerate.cluster import RayEngine
from hf_speculate_training.target import TargetSection, load_config, load_target, load_tokenizer

from ..support.training import save_target


pytest.importorskip("ray")

RECORDS = 160
OPTIONS = RegenerateOptions(max_new_tokens=24, batch_size=4, temperature=1.0, seed=1, chat=True)
COMMAND = ["--max-new-tokens", "24", "--batch-size", "4", "--temperature", "1.0", "--seed", "1", "--chat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ray")
    save_target(path / "target")
    lines = [json.dumps({"prompt": f"question {number} {'x' * (number % 7)}"}) for number in range(RECORDS)]
    (path / "data.jsonl").write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def of_one_process(folder):
    """Lines of a file that one process wrote, by id."""
    section, output = TargetSection(path=str(folder / "target"), dtype="float32"), folder / "local.jsonl"
    target = load_target(section, torch.device("cpu"))
    records = load_records(str(folder / "data.jsonl"))
    regenerate(target, load_tokenizer(section), records, output, OPTIONS, show_progress=False)
    return lines_of(output)


def lines_of(path) -> dict[str, dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines), "nothing twice"
    return {line["id"]: line for line in lines}


def begun(folder, output, *options, limit=None):
    """The command in a process of its own, with two actors."""
    arguments = ["--target", str(folder / "target"), "--data", str(folder / "data.jsonl"), "--output", str(output)]
    arguments += [*COMMAND, "--dtype", "float32", "--engine", "ray", "--actors", "2", *options]
    return subprocess.Popen(
        [sys.executable, "-m", "hf_speculate", "regenerate", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=None if limit is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )


def ended(process):
    printed, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return json.loads(printed.splitlines()[-1])


def actors_of(process) -> list[psutil.Process]:
    return [each for each in psutil.Process(process.pid).children(recursive=True) if "AnsweringActor" in name_of(each)]


def name_of(process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_text_of_two_actors_is_that_of_one_process(folder, of_one_process, tmp_path):
    report = ended(begun(folder, tmp_path / "out.jsonl"))
    assert report["num_written"] == RECORDS
    assert report["mean_acceptance_length"] >= 1
    assert lines_of(tmp_path / "out.jsonl") == of_one_process


def test_ray_engine_resumes_a_local_run(folder, of_one_process, tmp_path):
    output = tmp_path / "out.jsonl"
    lines = (folder / "local.jsonl").read_text().splitlines(keepends=True)
    output.write_text("".join(lines[: RECORDS // 2]))
    settings = (folder / "local.jsonl.settings").read_text()
    (tmp_path / "out.jsonl.settings").write_text(settings)
    report = ended(begun(folder, output))
    assert (report["num_found"], report["num_written"]) == (RECORDS // 2, RECORDS // 2)
    assert lines_of(output) == of_one_process


@pytest.mark.parametrize("who", ["an actor", "the driver"])
def test_ray_run_survives_the_kill_of_an_actor_or_driver(folder, of_one_process, tmp_path, who):
    output = tmp_path / "out.jsonl"
    process = begun(folder, output, "--retries", "1")
    wait_for(lambda: output.exists() and output.stat().st_size, process)
    actors = actors_of(process)
    assert len(actors) == 2
    if who == "an actor":
        actors[0].kill()
    else:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process = begun(folder, output)
    assert len(output.read_bytes().splitlines()) < RECORDS, "in the middle"
    report = ended(process)
    assert report["num_found"] + report["num_written"] == RECORDS
    assert lines_of(output) == of_one_process


def wait_for(condition, process, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.05)


def test_ray_run_resumes_after_a_full_disk(folder, of_one_process, tmp_path):
    """What was written stays, and the same command goes on."""
    section = TargetSection(path=str(folder / "target"), dtype="float32")
    tokenizer, config = load_tokenizer(section), load_config(section)
    planner = Planner(tokenizer, config, OPTIONS)
    records, output = load_records(str(folder / "data.jsonl")), tmp_path / "out.jsonl"
    engine = RayEngine(section, OPTIONS, None, actors=2)
    limit = (folder / "local.jsonl").stat().st_size // 2
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    answered = engine.answered

    def limited(batches):
        """The limit holds while lines are written, not for Ray's own files."""
        for jobs in answered(batches):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            yield jobs
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    engine.answered = limited
    try:
        with pytest.raises(Exception, match=r"cannot write .*out.jsonl: .*run the same command again"):
            write_answers(engine, planner, records, output, show_progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert 0 < len(lines_of(output)) < RECORDS
    report = write_answers(RayEngine(section, OPTIONS, None, actors=2), planner, records, output, show_progress=False)
    assert report.num_found + report.num_written == RECORDS
    assert lines_of(output) == of_one_process


def test_ray_errors_of_actors_end_in_one_line(folder, tmp_path):
    process = begun(folder, tmp_path / "out.jsonl", "--speculator", "no-such-drafter")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "no-such-drafter" in errors.splitlines()[-1]
    assert "Traceback" not in errors
