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


def curves(history: LogHistory) -> dict[str, Curve]:
    """Metric -> (steps, values), in the order of the run; what a resumed run logged twice counts once, the newest."""
    found: dict[str, dict[int, float]] = {}
    for entry in history:
        for name, value in entry.items():
            if isinstance(value, int | float) and name not in ("step", "epoch"):
                found.setdefault(name, {})[entry.get("step", 0)] = float(value)
    return {name: (sorted(points), [points[s] for s in sorted(points)]) for name, points in found.items()}


def plot_run(history: LogHistory, path: str | os.PathLike, title: str = "") -> None:
    """Draws what the history holds; panels without data are left out.

    Raises:
        SpeculateError: matplotlib is not installed, or nothing was logged.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise SpeculateError("the curves need matplotlib: pip install 'hf-speculate[train]'.") from error
    found = curves(history)
    panels = [panel for panel in (_plot_loss, _plot_accuracy, _plot_acceptance) if panel(None, found)]
    if not panels:
        raise SpeculateError("nothing to plot: the run logged neither a loss nor an evaluation.")
    figure = Figure(figsize=(5.2 * len(panels), 3.8), layout="constrained", dpi=130)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes, found)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("step")
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title, fontsize=11)
    figure.savefig(path)


def _plot_loss(axes: Any, found: Mapping[str, Curve]) -> bool:
    names = [name for name in ("loss", "eval_loss") if name in found]
    if axes is None:
        return bool(names)
    if "loss" in names:
        steps, values = found["loss"]
        axes.plot(steps, values, color="tab:blue", alpha=0.25, linewidth=1)
        axes.plot(steps, _smoothed(values), color="tab:blue", linewidth=1.6, label="training (smoothed)")
    if "eval_loss" in names:
        axes.plot(*found["eval_loss"], color="tab:orange", marker="o", markersize=3.5, label="evaluation")
    axes.set_title("loss")
    axes.legend(frameon=False, fontsize=8)
    return True


def _plot_accuracy(axes: Any, found: Mapping[str, Curve]) -> bool:
    """One colour a draft step: evaluation drawn through, training faint behind it."""
    steps = sorted({int(match[1]) for name in found if (match := _STEP_METRIC.search(name))})
    if axes is None:
        return bool(steps)
    from matplotlib import colormaps

    for step in steps:
        color = colormaps["viridis"](0.9 * step / max(len(steps) - 1, 1))
        train, evaluation = f"accuracy_{step}", f"eval_accuracy_{step}"
        if train in found:
            behind = evaluation in found
            label = None if behind else f"token {step + 1}"
            style = {"alpha": 0.3, "linewidth": 1.0} if behind else {"linewidth": 1.4}
            axes.plot(found[train][0], _smoothed(found[train][1]), color=color, label=label, **style)
        if evaluation in found:
            axes.plot(*found[evaluation], color=color, marker="o", markersize=3, label=f"token {step + 1}")
    axes.set_title(
        "draft token equals the target's" + (" (faint: training)" if f"eval_accuracy_{steps[0]}" in found else "")
    )
    axes.legend(frameon=False, fontsize=8, ncols=2)
    return True


def _plot_acceptance(axes: Any, found: Mapping[str, Curve]) -> bool:
    names = [name for name in found if name.startswith(_ACCEPTANCE)]
    if axes is None:
        return bool(names)
    names = [name for name in names if name != _ACCEPTANCE] or names  # it is the first one of several
    for name in names:
        label = name.removeprefix(_ACCEPTANCE).strip("_").replace("_", " ") or None
        axes.plot(*found[name], marker="o", markersize=3.5, label=label)
        axes.annotate(
            f"{found[name][1][-1]:.2f}",
            (found[name][0][-1], found[name][1][-1]),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=8,
            va="center",
        )
    axes.set_title("mean acceptance length, held-out prompts")
    if len(names) > 1:
        axes.legend(frameon=False, fontsize=8)
    return True


def _smoothed(values: Sequence[float]) -> list[float]:
    """Exponential moving average without the pull of its start."""
    weight = 2 / (1 + max(1.0, len(values) * _SMOOTHED_OVER))
    mean, result, total = 0.0, [], 0.0
    for value in values:
        mean, total = mean + weight * (value - mean), total + weight * (1 - total)
        result.append(mean / total)
    return result
