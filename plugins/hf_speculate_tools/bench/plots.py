"""Pictures of `bench generate`: speed-up by category, acceptance by depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_speculate.errors import SpeculateError
from hf_speculate.files import user_path


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MAX_WIDTH = 18.0  # inches


def draw_generate(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draws speed-up by category and acceptance by depth at the first batch size, a panel for each temperature.

    Returns:
        The PNG files.
    Raises:
        SpeculateError: the folder cannot be written.
    """
    size = result["rows"][0]["batch_size"]
    rows = [row for row in result["rows"] if row["batch_size"] == size]
    title = f"{_title(result)}, batch {size}, {result['num_prompts']} prompts, {result['max_new_tokens']} new tokens"
    return _write(folder, title, {"speedup": _speedup(rows), "acceptance": _acceptance(rows)})


def _write(folder: Path, title: str, figures: dict[str, Figure]) -> list[Path]:
    folder = Path(user_path(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            figure.suptitle(title, fontsize=9, color="#555555", x=0.01, ha="left")
            figure.savefig(folder / f"{name}.png", dpi=150)
    except OSError as error:
        raise SpeculateError(f"cannot write plots to {folder}: {error}") from error
    return [folder / f"{name}.png" for name in figures]


def _title(result: dict[str, Any]) -> str:
    env = result["environment"]
    return f"{Path(result['target']).name}, {result['dtype']}, {env['device']}, {env['threads']} threads"


def _panels(rows: Sequence[dict[str, Any]], width: float) -> tuple[Figure, dict[float, Axes]]:
    """One panel for each temperature, with a common scale; side by side while that can be read."""
    from matplotlib.figure import Figure

    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    shape = (1, len(temperatures)) if width * len(temperatures) <= _MAX_WIDTH else (len(temperatures), 1)
    size = (min(width, _MAX_WIDTH) * shape[1], 4.2 * shape[0])
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(*shape, sharey=True, squeeze=False).flatten()
    for axis, temperature in zip(axes, temperatures, strict=True):
        axis.set_title(f"temperature {temperature:g}" if temperature else "greedy", fontsize=11)
    return figure, dict(zip(temperatures, axes, strict=True))


def _speedup(rows: Sequence[dict[str, Any]]) -> Figure:
    """Bars over eager, a group for each category, baselines in grey; the whiskers are the range over the repeats."""
    shown = [row for row in rows if row["kind"] != "eager"]
    groups = ["all", *shown[0].get("categories", {})]
    names = list(dict.fromkeys(row["method"] for row in shown))
    width = 0.8 / len(names)
    stock = list(dict.fromkeys(row["method"] for row in shown if row["kind"] != "speculator"))
    greys = {name: str(0.3 + 0.45 * index / len(stock)) for index, name in enumerate(stock)}
    figure, axes = _panels(shown, max(4.0, 1.0 + 0.32 * len(groups) * len(names)))
    for row in shown:
        index, axis = names.index(row["method"]), axes[row["temperature"]]
        heights = [part["speedup"]["eager"] for part in (row, *row.get("categories", {}).values())]
        low, high = row["speedup_range"]["eager"]
        rest = [0.0] * (len(heights) - 1)
        color = greys.get(row["method"], f"C{index}")
        places = [group + (index - (len(names) - 1) / 2) * width for group in range(len(groups))]
        whiskers = [[heights[0] - low, *rest], [high - heights[0], *rest]]
        bars = axis.bar(places, heights, 0.92 * width, yerr=whiskers, color=color, label=row["method"])
        axis.bar_label(bars, fmt="%.2f", label_type="center", rotation=90, fontsize=7, color="white")
    for axis in axes.values():
        axis.axhline(1.0, color="black", lw=0.8, ls="--")
        axis.set_xticks(range(len(groups)), groups, rotation=20 if groups[1:] else 0)
        axis.set_ylabel("times stock eager generate")
    handles, labels = next(iter(axes.values())).get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _acceptance(rows: Sequence[dict[str, Any]]) -> Figure:
    """Share of the rounds with a node at a depth that were accepted so deep."""
    shown = [row for row in rows if row["speculation"]]
    figure, axes = _panels(shown, 4.4)
    for row in shown:
        stats = row["speculation"]
        rates = {int(depth): rate for depth, rate in stats["acceptance_rate_by_depth"].items()}
        label = f"{row['method']} ({stats['mean_acceptance_length'] or 1:.2f} tokens per drafted round)"
        axes[row["temperature"]].plot(list(rates), list(rates.values()), "o-", ms=4, label=label)
    for axis in axes.values():
        axis.set(xlabel="depth", ylabel="accepted, of rounds that drafted so deep", ylim=(0, 1.02))
        axis.grid(axis="y", alpha=0.3)
        axis.legend(fontsize=7, frameon=False)
    return figure
