"""Phase `tests`: the tests marked `gpu`, in a process of pytest.

Only the modules that mention the mark are collected. Others may import packages that a lent machine does not have.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .setting import Setting


TESTS = Path(__file__).resolve().parents[1]
_MARK, _SLOW = "pytest.mark.gpu", '"inductor"'
_TRACE_LINES = 16
_NO_TESTS = 5  # pytest's exit status
_OUTCOME = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)", re.MULTILINE)


def modules() -> list[str]:
    """Paths of the test modules with tests marked `gpu`, from the root of the checkout; last those that run inductor,
    which takes minutes."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(TESTS.rglob("test_*.py"))}
    found = sorted((path for path in texts if _MARK in texts[path]), key=lambda path: _SLOW in texts[path])
    return [path.relative_to(TESTS.parent).as_posix() for path in found]


def measure(setting: Setting) -> None:
    """Runs the tests for as long as the phase lasts. Writes a finding with counts, and one for each failure.

    Without a GPU the tests are imported and counted only.
    """
    with tempfile.TemporaryDirectory() as folder:
        results, log = Path(folder, "results.xml"), Path(folder, "log")
        # Without the options of pyproject.toml: checks of shapes need a package that may be missing.
        command = [sys.executable, "-m", "pytest", "-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider"]
        command += ["--tb=short", "-m", "gpu", "--continue-on-collection-errors", f"--junitxml={results}"]
        command += ["-v"] if setting.on_cuda else ["-q", "--collect-only"]
        with log.open("w") as file:
            try:
                options: dict[str, Any] = {"stdout": file, "stderr": subprocess.STDOUT, "timeout": setting.left}
                status = subprocess.run([*command, *modules()], cwd=TESTS.parent, **options).returncode
            except subprocess.TimeoutExpired:
                status = None
        text = log.read_text(errors="replace")
        outcomes = dict(_OUTCOME.findall(text))
        failures = _failures(results) or {
            name: ("", []) for name, found in outcomes.items() if found in ("FAILED", "ERROR")
        }
    finding: dict[str, Any] = {"passed": list(outcomes.values()).count("PASSED"), "failed": len(failures)}
    if not setting.on_cuda:
        finding = {"collected": len(re.findall(r"^\S+::", text, re.MULTILINE)), "skipped": "there is no GPU"}
    if status is None:
        finding["left_out"] = "tests that had not ended when the time was over"
    elif status not in (0, 1, _NO_TESTS) and not failures:
        finding["error"] = f"pytest ended with status {status}: {text[-300:]}"
    setting.report(**finding)
    for name, (message, trace) in failures.items():
        setting.report(test=name, error=message, trace=trace)


def _failures(results: Path) -> dict[str, tuple[str, list[str]]]:
    """Name of each failed test -> first line of its error and last lines of its traceback, from pytest's XML; empty
    without that file."""
    if not results.exists():
        return {}
    found = {}
    for case in ElementTree.parse(results).iter("testcase"):
        for problem in (*case.findall("failure"), *case.findall("error")):
            lines = [problem.get("message") or "", *(problem.text or "").splitlines()]
            # Of a module that cannot be imported the message says only that.
            causes = [line.removeprefix("E").strip() for line in lines if line.startswith("E  ")]
            message = causes[0] if lines[0] == "collection failure" and causes else (lines[0].splitlines() or [""])[0]
            name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
            found[name] = message[:300], lines[-_TRACE_LINES:]
    return found
