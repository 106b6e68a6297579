"""Tables and the last line of a report, made of its findings. It imports neither torch nor the package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .targets import Finding, Rows, judged


# Key in a profile -> column.
_OF_A_ROUND = {
    "launches": "launches",
    "graph_launches": "replays",
    "synchronisations": "waits",
    "busy_ms": "device busy, ms",
}


def markdown(findings: Sequence[Finding]) -> str:
    """The tables of a report: where it ran, targets, speed, rounds, attention."""
    parts = [_title(findings), _targets(findings), _speed(findings), _rounds(findings), _attention(findings)]
    return "\n\n".join(part for part in parts if part)


def _title(findings: Sequence[Finding]) -> str:
    environment = next((each for each in findings if "card" in each), None)
    if environment is None:
        return ""
    versions = ", ".join(f"{name} {environment['versions'][name]}" for name in ("torch", "transformers", "triton"))
    return f"{environment['card']}, {versions}, {environment['date']}. bf16, and batch 1 unless a row names another."


def _targets(findings: Sequence[Finding]) -> str:
    if all(each["phase"] != "speed" for each in findings):
        return ""
    columns = ("target", "place", "wanted", "found", "met")
    rows = [
        [row["target"], row["place"], row["wanted"], row["found"] or "not measured", _yes_or_no(row["met"])]
        for row in judged(findings)
    ]
    return table(columns, rows)


def _speed(findings: Sequence[Finding]) -> str:
    columns = ("model", "way", "tokens/s", "x HF eager", "x HF static", "tokens per round", "ms per round", "same text")
    return table(
        columns,
        [
            [
                row["cell"],
                row["way"],
                _number(row["tokens_per_second"], 1),
                _number(row.get("x_eager"), 2, "x"),
                _number(row.get("x_static"), 2, "x"),
                _number(row.get("tokens_per_round"), 2),
                _number(row.get("ms_per_round"), 2),
                _yes_or_no(row["same_text"]),
            ]
            for row in Rows(findings).by_place.values()
        ],
    )


def _rounds(findings: Sequence[Finding]) -> str:
    measured = [each for each in findings if each["phase"] == "rounds" and "ms_per_round" in each]
    profiles = {
        (each["mode"], each["cudnn"]): each for each in findings if each["phase"] == "rounds" and "rounds" in each
    }
    rows = []
    for row in measured:
        found = profiles.get((row["mode"], row["cudnn"]), {})
        profile, number = found.get("profile", {}), max(found.get("rounds", 1), 1)
        rows.append(
            [
                row["mode"],
                row["cudnn"],
                _number(row["ms_per_round"], 2),
                _number(row["tokens_per_round"], 2),
                *(_number(profile[key] / number, 1) if key in profile else "" for key in _OF_A_ROUND),
            ]
        )
    columns = ("pycoder, its head", "cuDNN", "ms per round", "tokens per round", *_OF_A_ROUND.values())
    return table(columns, rows)


def _attention(findings: Sequence[Finding]) -> str:
    found = [each for each in findings if each["phase"] == "attention" and "fastest" in each]
    nodes = list(dict.fromkeys(count for each in found for count in each["fastest"]))
    rows = [
        ["/".join(map(str, each["heads"])), str(each["context"]), *(each["fastest"].get(count, "") for count in nodes)]
        for each in found
    ]
    return table(("heads", "keys", *(f"fastest, {count} nodes" for count in nodes)), rows)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; "" without rows."""
    if not rows:
        return ""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)


def summary(findings: Sequence[Finding]) -> Finding:
    """Everything important as one JSON-serialisable object."""
    environment = next((each for each in findings if "card" in each), {})
    kept = ("card", "date", "versions", "cuda", "cudnn", "missing")
    texts = [each for each in findings if each["phase"] == "text" and "equal" in each]
    errors = [each for each in findings if "error" in each]
    targets: dict[str, list[Any]] = {}
    for row in judged(findings):
        targets.setdefault(row["target"], []).append([row["place"], row["found"], row["met"]])
    return {
        "report": "gpu",
        **{key: environment.get(key) for key in kept},
        "seconds": {each["phase"]: each["seconds"] for each in findings if "done" in each},
        "targets": targets,
        "speed": {
            "columns": _SHORT,
            "rows": [[row.get(key) for key in _SHORT] for row in Rows(findings).by_place.values()],
        },
        "texts": {
            f"{each['mode']}, {each['case']}": [each["rows"], each["equal"], each.get("ties", 0)] for each in texts
        },
        "training": [
            [each["length"], each["cudnn_allowed"], each["ms"], each["finite"]]
            for each in findings
            if each["phase"] == "training" and "ms" in each
        ],
        "left_out": [f"{each['phase']}: {each['left_out']}" for each in findings if "left_out" in each],
        "errors": [_error(each) for each in errors[:20]],
        "num_errors": len(errors),
    }


_SHORT = ["cell", "way", "tokens_per_second", "x_eager", "x_static", "tokens_per_round", "ms_per_round"]


def _error(finding: Finding) -> str:
    where = ", ".join(str(finding[key]) for key in ("phase", "mode", "case", "cell", "way", "test") if key in finding)
    return f"{where}: {finding['error']}"[:240]


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "" if value is None else f"{value:.{digits}f}{unit}"


def _yes_or_no(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"
