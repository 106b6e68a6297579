"""Bar chart of `bench_headline`, readable on a light and on a dark page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_speculate.errors import SpeculateError
from hf_speculate.files import user_path


# Colours with enough contrast on white and on near-black.
_TEXT, _OTHERS, _OURS = "#7d8590", "#8b949e", "#1f883d"
_BAR = 0.38


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draws tokens per second of every method: greedy in full colour, sampled in a lighter one.

    Returns:
        The PNG file, `headline.png`.
    Raises:
        SpeculateError: the folder cannot be written.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["method"] for row in result["rows"]))
    temperatures = list(dict.fromkeys(row["temperature"] for row in result["rows"]))
    figure = Figure(figsize=(8.6, 0.5 + 0.62 * len(names)), layout="constrained")
    axis = figure.subplots()
    for row in result["rows"]:
        index, number = names.index(row["method"]), temperatures.index(row["temperature"])
        place = index + (number - (len(temperatures) - 1) / 2) * _BAR
        rate = row["tokens_per_second"]["median"]
        color = _OTHERS if row["kind"] == "engine" or index == 0 else _OURS
        bar = axis.barh(place, rate, 0.92 * _BAR, color=color, alpha=1.0 if number == 0 else 0.55)
        kind = "greedy" if row["temperature"] == 0 else f"T={row['temperature']:g}"
        axis.bar_label(bar, [f"{rate:.0f} ({kind})"], padding=4, fontsize=8.5, color=_TEXT)
    axis.set_yticks(range(len(names)), [_short(name, result) for name in names], fontsize=9.5)
    axis.invert_yaxis()
    axis.set_xlabel("tokens per second", fontsize=9)
    axis.margins(x=0.12)
    axis.tick_params(colors=_TEXT, length=0)
    axis.xaxis.label.set_color(_TEXT)
    axis.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axis.set_xticks([])
    file = Path(user_path(folder), "headline.png")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=160, transparent=True)
    except OSError as error:
        raise SpeculateError(f"cannot write the picture {file}: {error}") from error
    return [file]


def _short(name: str, result: dict[str, Any]) -> str:
    """A method's label: the bundled head by what it is."""
    words = name.replace(str(result["head"]), "EAGLE-3 head").rpartition("/")[-1].replace("+suffix", " + suffix")
    if name == result["rows"][0]["method"]:
        return "transformers\n(dequantises the file)"
    ours = name not in {row["method"] for row in result["rows"] if row["kind"] == "engine"}
    return f"hf_speculate: {words}" if ours else words
