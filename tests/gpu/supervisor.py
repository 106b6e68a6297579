"""One run of the report: its clock, its processes and its findings.

The process of the report itself imports neither torch nor the package. So nothing that a phase does can break it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Any, TextIO


ROOT = Path(__file__).resolve().parents[2]
SECONDS = {"env": 10, "tests": 60, "text": 60, "attention": 40, "rounds": 40, "speed": 180, "training": 30}
UNTIMED = ("tests", "text")
WAYS = ("eager", "recorded", "compiled")
# A phase checks the clock between measurements. It is ended by force if it is late by this many seconds, and by this
# share of its own time.
_LATE_SECONDS, _LATE_SHARE = 15.0, 0.25
_LATE_RUN_SECONDS = 30.0
_BACKGROUND = ("8B", "0.5B", "pycoder")
_LOG_CHARACTERS = 400
_NOT_BEGUN = "its process died before it began"


class Report:
    """One run: its clock, its processes and its findings.

    Args:
        phases: names of the phases, in order.
        minutes: minutes for all of them.
        device: "cuda" or "cpu".
        is_tiny: whether sizes are tiny.
        out: file that gets the findings, too; None for none.
        ways: how rounds are run: "eager", "recorded", "compiled".
    """

    def __init__(
        self,
        phases: Sequence[str],
        minutes: float,
        device: str,
        is_tiny: bool,
        out: TextIO | None,
        ways: Sequence[str] = WAYS,
    ):
        self.device, self.is_tiny, self.out, self.ways = device, is_tiny, out, list(ways)
        self.findings: list[dict[str, Any]] = []
        self.start = time.monotonic()
        scale = 60 * minutes / sum(SECONDS[name] for name in phases)
        self.seconds = {name: scale * SECONDS[name] for name in phases}
        self.end = self.start + 60 * minutes
        self._background: list[subprocess.Popen[bytes]] = []
        self._folder = tempfile.TemporaryDirectory()
        self.environment = _environment(Path(self._folder.name), device)

    def run(self) -> None:
        """Runs all phases. The findings then hold everything."""
        names = list(self.seconds)
        try:
            self._run_in_workers(names)
        finally:
            self._end(self._background)
            self._folder.cleanup()

    def write(self, finding: dict[str, Any]) -> None:
        """Keeps and prints a finding."""
        self.findings.append(finding)
        self.print(json.dumps({**finding, "at": round(time.monotonic() - self.start, 1)}))

    def print(self, text: str) -> None:
        """Prints text at once, and writes it to the file."""
        for file in (sys.stdout, self.out):
            if file is not None:
                file.write(text + "\n")
                file.flush()

    def _planned(self, name: str) -> float:
        """The moment at which a phase is planned to end."""
        names = list(self.seconds)
        return self.start + sum(self.seconds[each] for each in names[: names.index(name) + 1])

    def _after(self, name: str) -> None:
        """Compiles in the background what `speed` needs, while nothing is timed."""
        untimed = [each for each in self.seconds if each in UNTIMED]
        if name == "env" and self.device == "cuda" and untimed and "speed" in self.seconds:
            self._background = [self._process({"warm": each}, subprocess.DEVNULL) for each in _BACKGROUND]
        if self._background and name == untimed[-1]:
            ended = {each: process.poll() for each, process in zip(_BACKGROUND, self._background, strict=True)}
            self._end(self._background)
            self.write({"phase": name, "compiled_in_background": {each: code == 0 for each, code in ended.items()}})

    def _run_in_workers(self, names: Sequence[str]) -> None:
        """Runs phases in one process after the other, a new one after each that died or was ended."""
        left = list(names)
        while left:
            if time.monotonic() > self.end + _LATE_RUN_SECONDS / 2:
                for name in left:
                    self.write({"phase": name, "error": "left out: the minutes are over"})
                return
            left = left[self._run_worker(left) :]
            if any(each.get("device_lost") and each["phase"] == "env" for each in self.findings):
                return  # there is no device at all

    def _run_worker(self, names: Sequence[str]) -> int:
        """Runs phases in a new process. Returns how many have ended, the one included that broke it."""
        reading, writing = os.pipe()
        phases = [[name, self._planned(name), self.seconds[name] / 3] for name in names]
        with self._log() as log:
            begin = log.seek(0, os.SEEK_END)
            process = self._process({"phases": phases, "lines": writing}, log, (writing,))
            os.close(writing)
            lines: queue.Queue[str | None] = queue.Queue()
            threading.Thread(target=_read, args=(reading, lines), daemon=True).start()
            for ended, name in enumerate(names):
                problem = self._follow(lines, name)
                if problem is None:
                    continue
                self._end([process])
                if problem == _NOT_BEGUN and ended:
                    return ended  # the phase before it has broken the process, and said so
                log.seek(begin)
                text = log.read().decode(errors="replace")[-_LOG_CHARACTERS:]
                self.write({"phase": name, "error": problem, "log": text})
                return ended + 1
            self._end([process], patience=5.0)
            return len(names)

    def _log(self) -> IO[bytes]:
        """What a process prints: beside the findings if they go to a file."""
        return tempfile.TemporaryFile() if self.out is None else open(f"{self.out.name}.log", "a+b")

    def _follow(self, lines: queue.Queue[str | None], name: str) -> str | None:
        """Writes the findings of a phase until it is done. Returns why it was not, if so."""
        late = _LATE_SECONDS + _LATE_SHARE * self.seconds[name]
        limit = min(latest(self._planned(name), self.seconds[name] / 3) + late, self.end + _LATE_RUN_SECONDS)
        has_begun = False
        while True:
            seconds = limit - time.monotonic()
            try:
                line = lines.get(timeout=max(seconds, 0.1))
            except queue.Empty:
                return "ended by force: it hung, or one measurement took too long"
            if line is None:
                return "its process died" if has_begun else _NOT_BEGUN
            has_begun = True
            finding = json.loads(line)
            self.write(finding)
            if "done" in finding:
                self._after(name)
                return None

    def _process(self, request: dict[str, Any], log: Any, descriptors: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        request = {"device": self.device, "tiny": self.is_tiny, "ways": self.ways, **request}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.worker", json.dumps(request)],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=tuple(descriptors),
            start_new_session=True,  # with the compilers that it starts
        )

    def _end(self, processes: list[subprocess.Popen[bytes]], patience: float = 0.0) -> None:
        """Ends processes with all that they have started."""
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(patience, 0.01))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        processes.clear()


def latest(planned: float, least: float) -> float:
    """The end of a phase that begins now: as planned, but at least so many seconds from now, however late it is."""
    return max(planned, time.monotonic() + least)


def _read(descriptor: int, lines: queue.Queue[str | None]) -> None:
    """Passes lines on as they come, and None at the end."""
    with os.fdopen(descriptor) as file:
        for line in file:
            lines.put(line)
    lines.put(None)


def _environment(folder: Path, device: str) -> dict[str, str]:
    """The environment of all processes: this checkout comes first, nothing is downloaded, no cost is remembered."""
    paths = [str(ROOT), str(ROOT / "plugins"), str(ROOT / "training")]
    if not entry_points(group="hf_speculate.drafters"):
        _write_entry_points(folder)
        paths.append(str(folder))
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    fixed = {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**os.environ, **fixed, **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})}


def _write_entry_points(folder: Path) -> None:
    """Writes the metadata by which drafters are found, where the package is not installed."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = folder / f"hf_speculate-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hf-speculate\nVersion: {project['version']}\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in points.items())])
        for group, points in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n\n".join(groups) + "\n")
