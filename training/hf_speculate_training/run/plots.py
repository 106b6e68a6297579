"""Loss, accuracy and acceptance over the steps of a run, as one PNG, from the trainer's log history."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas

from hf_speculate.errors import SpeculateError
from hf_speculate.files import replace_files

from .evaluation import ACCEPTANCE


_ACCEPTANCE = f"eval_{ACCEPTANCE}"
_STEP_METRIC = re.compile(r"accuracy_(\d+)")
_SMOOTHED_OVER = 0.05  # share of a curve's points


def plot_run(history: Sequence[Mapping[str, Any]], path: str | os.PathLike, title: str = "") -> None:
    """Draws the curves of a log history; panels without data are left out. Raises `SpeculateError` if nothing can be
    drawn or written."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise SpeculateError("the curves need matplotlib: pip install 'hf-speculate[train]'.") from error
    # By step; the newest counts if a resumed run logged a step twice.
    found: Any = pandas.DataFrame([{"step": 0, **entry} for entry in history]).groupby("step").last() if history else {}
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
    drawn = {name: lines for name, lines in panels.items() if any({*line[:2]} & set(found) for line in lines)}
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
    place = Path(path)
    replace_files(place.parent, {place.name: figure.savefig})


def _draw(axes: Any, found: pandas.DataFrame, train: str, evaluation: str, label: str, color: Any) -> None:
    """Draws a metric of the evaluation, and that of the training, smoothed and faint, in the background."""
    if train in found:
        curve = found[train].dropna()
        smoothed = curve.ewm(span=max(1.0, len(curve) * _SMOOTHED_OVER)).mean()
        axes.plot(curve.index, smoothed, color=color, alpha=0.4, linewidth=1.2, label=f"{label} training".strip())
    if evaluation in found:
        curve = found[evaluation].dropna()
        name = f"{label} evaluation".strip() if train in found else label or None
        axes.plot(curve.index, curve, color=color, marker="o", markersize=3, label=name)
        if evaluation.startswith(_ACCEPTANCE):
            place, value = (curve.index[-1], curve.iloc[-1]), f"{curve.iloc[-1]:.2f}"
            axes.annotate(value, place, (4, 0), textcoords="offset points", fontsize=8, va="center")
