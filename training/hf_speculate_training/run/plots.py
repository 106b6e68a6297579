"""Loss, accuracy and acceptance over the steps of a run, as one PNG, from the trainer's log history."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hf_speculate.errors import SpeculateError

from .evaluation import ACCEPTANCE


LogHistory = Sequence[Mapping[str, Any]]
Curve = tuple[list[int], list[float]]

_ACCEPTANCE = f"eval_{ACCEPTANCE}"
_STEP_METRIC = re.compile(r"accuracy_(\d+)")
_SMOOTHED_OVER = 0.05  # share of a curve's points


def plot_run(history: LogHistory, path: str | os.PathLike, title: str = "") -> None:
    """Draws the curves of a log history; panels without data are left out.

    Args:
        history: the trainer's log history.
        path: PNG file to write.
        title: title above the panels.
    Raises:
        SpeculateError: matplotlib is not installed, or nothing was logged.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise SpeculateError("the curves need matplotlib: pip install 'hf-speculate[train]'.") from error
    found = curves(history)
    steps = sorted({int(match[1]) for name in found if (match := _STEP_METRIC.search(name))})
    colors = [colormaps["viridis"](0.9 * step / max(len(steps) - 1, 1)) for step in steps]
    lengths = [name for name in found if name.startswith(_ACCEPTANCE)]
    lengths = [name for name in lengths if name != _ACCEPTANCE] or lengths  # a copy of the first of several
    # By panel: metric, evaluated metric, label, colour.
    panels = {
        "loss": [("loss", "eval_loss", "", "tab:blue")],
        "draft token equals the target's": [
            (f"accuracy_{step}", f"eval_accuracy_{step}", f"token {step + 1}", color)
            for step, color in zip(steps, colors, strict=True)
        ],
        "mean acceptance length, held-out prompts": [
            ("", name, name.removeprefix(_ACCEPTANCE).strip("_").replace("_", " "), None) for name in lengths
        ],
    }
    drawn = {name: lines for name, lines in panels.items() if any({*line[:2]} & found.keys() for line in lines)}
    if not drawn:
        raise SpeculateError("nothing to plot: the run logged neither a loss nor an evaluation.")
    figure = Figure(figsize=(5.2 * len(drawn), 3.8), layout="constrained", dpi=130)
    for axes, (name, lines) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn.items(), strict=True):
        for line in lines:
            _draw(axes, found, *line)
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False, fontsize=8, ncols=2)
    if title:
        figure.suptitle(title, fontsize=11)
    figure.savefig(path)


def curves(history: LogHistory) -> dict[str, Curve]:
    """Steps and values by metric, in the order of the run. The newest counts if a resumed run logged a step twice."""
    found: dict[str, dict[int, float]] = {}
    for entry in history:
        for name, value in entry.items():
            if isinstance(value, int | float) and name not in ("step", "epoch"):
                found.setdefault(name, {})[entry.get("step", 0)] = float(value)
    return {name: (sorted(points), [points[s] for s in sorted(points)]) for name, points in found.items()}


def _draw(axes: Any, found: Mapping[str, Curve], train: str, evaluation: str, label: str, color: Any) -> None:
    """Draws a metric of the evaluation, and that of the training, smoothed and faint, in the background."""
    if train in found:
        steps, values = found[train]
        name = f"{label} training".strip()
        axes.plot(steps, _smoothed(values), color=color, alpha=0.4, linewidth=1.2, label=name)
    if evaluation in found:
        steps, values = found[evaluation]
        name = f"{label} evaluation".strip() if train in found else label or None
        axes.plot(steps, values, color=color, marker="o", markersize=3, label=name)
        if evaluation.startswith(_ACCEPTANCE):
            place = (steps[-1], values[-1])
            axes.annotate(f"{values[-1]:.2f}", place, (4, 0), textcoords="offset points", fontsize=8, va="center")


def _smoothed(values: Sequence[float]) -> list[float]:
    """Exponential moving average, corrected for its start at 0."""
    weight = 2 / (1 + max(1.0, len(values) * _SMOOTHED_OVER))
    mean, result, total = 0.0, [], 0.0
    for value in values:
        mean, total = mean + weight * (value - mean), total + weight * (1 - total)
        result.append(mean / total)
    return result
