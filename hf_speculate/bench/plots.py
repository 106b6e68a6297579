"""PNGs of results: speed-up by category, acceptance by depth, where time goes, cost of a verification."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SpeculateError


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_OURS, _STOCK = "tab10", "Greys"
_PARTS = (
    ("prefill_seconds", "target, prompt", "#9ecae1"),
    ("drafter_prefill_seconds", "drafter, prompt", "#fdd0a2"),
    ("target_seconds", "target, rounds", "#3182bd"),
    ("drafter_seconds", "drafter, rounds", "#fd8d3c"),
    ("rest_seconds", "rest", "#636363"),
)


def draw_generate(result: dict[str, Any], folder: Path) -> list[Path]:
    """Speed-up by category, acceptance by depth and where time goes, at the first batch size; see `_write`."""
    size = result["rows"][0]["batch_size"]
    rows = [row for row in result["rows"] if row["batch_size"] == size]
    title = f"{_title(result)}, batch {size}, {result['num_prompts']} prompts, {result['max_new_tokens']} new tokens"
    return _write(folder, title, {"speedup": _speedup(rows), "acceptance": _acceptance(rows), "time": _time(rows)})


def draw_costs(result: dict[str, Any], folder: Path) -> list[Path]:
    """Milliseconds of a bare verification by nodes, a line a context; see `_write`."""
    return _write(folder, _title(result), {"costs": _costs([row for row in result["rows"] if "verify_ms" in row])})


def _write(folder: Path, title: str, figures: dict[str, Figure | None]) -> list[Path]:
    """The files, one a figure; raises `SpeculateError` where the folder cannot be written."""
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            if figure is not None:
                figure.suptitle(title, fontsize=9, color="#555555", x=0.01, ha="left")
                figure.savefig(folder / f"{name}.png", dpi=150)
                written.append(folder / f"{name}.png")
    except OSError as error:
        raise SpeculateError(f"cannot write plots to {folder}: {error}") from error
    return written


def _title(result: dict[str, Any]) -> str:
    env = result["environment"]
    return f"{Path(result['target']).name}, {result['dtype']}, {env['device']}, {env['threads']} threads"


def _panels(temperatures: Sequence[float], width: float, height: float) -> tuple[Figure, list[Axes]]:
    """One panel a temperature, with a common scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * len(temperatures), height), layout="constrained")
    axes = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    for axis, temperature in zip(axes, temperatures, strict=True):
        axis.set_title(f"temperature {temperature:g}" if temperature else "greedy", fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def _temperatures(rows: Sequence[dict[str, Any]]) -> list[float]:
    return list(dict.fromkeys(row["temperature"] for row in rows))


def _colors(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Speculators in colours, stock in greys; a method has the same one everywhere."""
    from matplotlib import colormaps

    ours = dict.fromkeys(row["method"] for row in rows if row["kind"] == "speculator")
    stock = dict.fromkeys(row["method"] for row in rows if row["kind"] != "speculator")
    colors = {name: colormaps[_OURS](index % 10) for index, name in enumerate(ours)}
    return colors | {name: colormaps[_STOCK](0.35 + 0.15 * index) for index, name in enumerate(stock)}


def _speedup(rows: Sequence[dict[str, Any]]) -> Figure:
    """Bars over eager, a group a category; the whiskers are the range over the repeats."""
    colors, temperatures = _colors(rows), _temperatures(rows)
    shown = [row for row in rows if row["kind"] != "eager"]
    categories = list(shown[0].get("categories", {}))
    groups = ["all", *categories]
    names = list(dict.fromkeys(row["method"] for row in shown))
    width = 0.8 / len(names)
    figure, axes = _panels(temperatures, max(4.0, 1.0 + 0.32 * len(groups) * len(names)), 4.2)
    for axis, temperature in zip(axes, temperatures, strict=True):
        for row in (row for row in shown if row["temperature"] == temperature):
            parts = [row, *(row["categories"][name] for name in categories)]
            heights = [part["speedup"]["eager"] for part in parts]
            low, high = row["speedup_range"]["eager"]
            whiskers = [[heights[0] - low, *[0.0] * len(categories)], [high - heights[0], *[0.0] * len(categories)]]
            places = [
                group + (names.index(row["method"]) - (len(names) - 1) / 2) * width for group in range(len(groups))
            ]
            color, label = colors[row["method"]], row["method"]
            axis.bar(places, heights, 0.92 * width, yerr=whiskers, color=color, label=label, error_kw={"lw": 0.8})
            for place, height in zip(places, heights, strict=True):
                axis.text(
                    place, 0.03, f"{height:.2f}", ha="center", va="bottom", rotation=90, fontsize=7, color="white"
                )
        axis.axhline(1.0, color="black", lw=0.8, ls="--")
        axis.set_xticks(range(len(groups)), groups, rotation=20 if categories else 0)
    axes[0].set_ylabel("times stock eager generate")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _acceptance(rows: Sequence[dict[str, Any]]) -> Figure | None:
    """Share of the rounds with a node at a depth that were accepted so deep."""
    from matplotlib.ticker import MaxNLocator

    shown = [row for row in rows if row["speculation"] and row["speculation"]["acceptance_rate_by_depth"]]
    if not shown:
        return None
    colors, temperatures = _colors(rows), _temperatures(shown)
    figure, axes = _panels(temperatures, 4.4, 3.8)
    for axis, temperature in zip(axes, temperatures, strict=True):
        for row in (row for row in shown if row["temperature"] == temperature):
            stats = row["speculation"]
            rates = {int(depth): rate for depth, rate in stats["acceptance_rate_by_depth"].items()}
            label = f"{row['method']} ({stats['mean_acceptance_length']:.2f} tokens a round)"
            axis.plot(list(rates), list(rates.values()), "o-", ms=4, color=colors[row["method"]], label=label)
        axis.set_xlabel("depth")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(axis="y", alpha=0.3)
        axis.legend(fontsize=7, frameon=False)
    axes[0].set_ylabel("accepted, of rounds that drafted so deep")
    axes[0].set_ylim(0, 1.02)
    return figure


def _time(rows: Sequence[dict[str, Any]]) -> Figure | None:
    """Seconds of all calls by what they went into, as parts of eager's for the same tokens."""
    shown = [row for row in rows if row["speculation"]]
    if not shown:
        return None
    temperatures = _temperatures(shown)
    names = list(dict.fromkeys(row["method"] for row in shown))
    figure, axes = _panels(temperatures, 4.8, 1.6 + 0.5 * len(names))
    for axis, temperature in zip(axes, temperatures, strict=True):
        for row in (row for row in shown if row["temperature"] == temperature):
            stats, left = row["speculation"], 0.0
            whole = 1 / row["speedup"]["eager"]
            for key, label, color in _PARTS:
                part = whole * max(stats[key], 0.0) / stats["total_seconds"]
                is_first = row["method"] == names[0]
                axis.barh(row["method"], part, left=left, color=color, label=label if is_first else None, height=0.6)
                left += part
            axis.text(left + 0.01, row["method"], f"{row['speedup']['eager']:.2f}x", va="center", fontsize=8)
        axis.axvline(1.0, color="black", lw=0.8, ls="--")
        axis.set_xlabel("time, eager = 1")
        axis.set_xlim(0, max(1.1, 1.12 * max(1 / row["speedup"]["eager"] for row in shown)))
    axes[0].invert_yaxis()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return figure


def _costs(rows: Sequence[dict[str, Any]]) -> Figure | None:
    """With the form of attention that the table shows last."""
    if not rows:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.8), layout="constrained")
    axis = figure.subplots()
    for context in dict.fromkeys(row["context"] for row in rows):
        shown = [row for row in rows if row["context"] == context]
        times = [list(row["verify_ms"].values())[-1] for row in shown]
        axis.plot([row["nodes"] for row in shown], times, "o-", ms=4, label=f"context {context}")
    nodes = sorted({row["nodes"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(nodes, [str(n) for n in nodes])
    axis.set_ylim(0)
    axis.set_xlabel("nodes scored, root included")
    axis.set_ylabel("ms of one target forward")
    axis.legend(fontsize=8, frameon=False)
    axis.grid(alpha=0.3)
    return figure
