"""Pictures, drawn with matplotlib: a round's draft tree, tokens by round, and the figures of `bench generate`.

`Round.draw` draws the tree as text, without matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_speculate.errors import CheckpointError, SpeculateError
from hf_speculate.files import replace_files, user_path
from hf_speculate.tree import Round


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from transformers import PreTrainedTokenizerBase


_ACCEPTED, _REJECTED, _OWN = "#2e7d32", "#b0bec5", "#ef6c00"
_MAX_WIDTH = 18.0  # inches


def plot_tree(
    round: Round, tokenizer: PreTrainedTokenizerBase | None = None, *, row: int = 0, axes: Axes | None = None
) -> Axes:
    """Draws a round's draft tree from left to right: the accepted path in green, the target's own token as a star.

    Args:
        round: a round of `hf_speculate.rounds`.
        tokenizer: decodes tokens to text; None shows token ids.
        row: row of the batch.
        axes: place of the picture; None makes a figure.

    Returns:
        The axes.

    Raises:
        SpeculateError: matplotlib is not installed, or the row emitted nothing in this round.
    """
    if not 0 <= row < len(round.tokens) or not round.tokens[row]:
        raise SpeculateError(f"row {row} emitted nothing in this round of {len(round.tokens)} rows: nothing to draw.")
    slot, emitted = round.tree.slot(row), round.tokens[row]
    tokens, parents = list(round.tree.host.token_ids[slot]), list(round.tree.host.parents[slot])
    path = list(round.paths[row][: len(emitted)])
    if round.num_accepted[row] < len(emitted):
        tokens.append(emitted[-1])
        parents.append(path[-1])
    own = len(round.tree.host.parents[slot])  # index of the target's own token
    places = _places(parents)
    depth, num_leaves = max(x for x, _ in places.values()), 1 - min(y for _, y in places.values())
    axes = axes or _new_axes((2.0 + 1.2 * depth, 1.2 + 0.35 * num_leaves))
    for node, (x, y) in places.items():
        is_accepted = node in path
        colour = _OWN if node == own else _ACCEPTED if is_accepted else _REJECTED
        if node:
            start = places[parents[node]]
            axes.plot([start[0], x], [start[1], y], color=colour, lw=2.0 if is_accepted else 1.0, zorder=1)
        axes.scatter([x], [y], s=90 if node == own else 40, marker="*" if node == own else "o", color=colour, zorder=2)
        text = str(tokens[node]) if tokenizer is None else repr(tokenizer.decode([tokens[node]]))
        axes.annotate(text, (x, y), (5, 4), textcoords="offset points", fontsize=8, parse_math=False)
    axes.set_title(f"{round.num_accepted[row]} drafted tokens accepted, {len(emitted)} emitted", fontsize=10)
    axes.set_xlabel("depth")
    axes.set_xticks(range(depth + 1))
    axes.margins(x=0.15, y=0.1)
    axes.set_yticks([])
    axes.spines[["left", "right", "top"]].set_visible(False)
    return axes


def plot_rounds(rounds: Iterable[Round], *, row: int = 0, axes: Axes | None = None) -> Axes:
    """Draws the tokens of every round as bars: accepted drafts below, the target's own token above, the size of the
    draft as a line.

    Args:
        rounds: rounds of `hf_speculate.rounds`. The prompt's round is left out.
        row: row of the batch.
        axes: place of the picture; None makes a figure.

    Returns:
        The axes.

    Raises:
        SpeculateError: matplotlib is not installed, or the row emitted nothing in these rounds.
    """
    shown = [round for round in rounds if not round.is_prefill and row < len(round.tokens) and round.tokens[row]]
    if not shown:
        raise SpeculateError(f"row {row} emitted nothing in these rounds: nothing to draw.")
    accepted = [round.num_accepted[row] for round in shown]
    own = [len(round.tokens[row]) - count for round, count in zip(shown, accepted, strict=True)]
    axes = axes or _new_axes((7.0, 3.0))
    places = range(1, len(shown) + 1)
    axes.bar(places, accepted, color=_ACCEPTED, label="accepted drafts")
    axes.bar(places, own, bottom=accepted, color=_OWN, label="the target's own token")
    axes.plot(places, [round.num_nodes for round in shown], color="#546e7a", lw=1, label="draft nodes")
    axes.set(xlabel="round", ylabel="tokens")
    axes.set_title(f"{(sum(accepted) + sum(own)) / len(shown):.2f} tokens per round", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    return axes


def draw_generate(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draws speed-up by category and acceptance by depth at the first batch size, a panel for each temperature.

    Returns:
        The PNG files.
    Raises:
        SpeculateError: the folder cannot be written.
    """
    size, env, folder = result["rows"][0]["batch_size"], result["environment"], Path(user_path(folder))
    rows = [row for row in result["rows"] if row["batch_size"] == size]
    title = (
        f"{Path(result['target']).name}, {result['dtype']}, {env['device']}, {env['threads']} threads, batch {size}, "
        f"{result['num_prompts']} prompts, {result['max_new_tokens']} new tokens"
    )
    files = {folder / "speedup.png": _speedup(rows), folder / "acceptance.png": _acceptance(rows)}
    for figure in files.values():
        figure.suptitle(title, fontsize=9, color="#555555", x=0.01, ha="left")
    try:
        replace_files(folder, {path.name: partial(figure.savefig, dpi=150) for path, figure in files.items()})
    except CheckpointError as error:
        raise SpeculateError(f"cannot write plots to {folder}: {error}") from error
    return list(files)


def _new_axes(size: tuple[float, float]) -> Axes:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise SpeculateError("pictures need matplotlib: pip install 'hf-speculate[plots]'.") from error
    return pyplot.subplots(figsize=size, layout="constrained")[1]


def _places(parents: Sequence[int]) -> dict[int, tuple[int, float]]:
    """Depth and height of every node: leaves take one line each from the top, other nodes stand amid their children."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        if parent >= 0:
            children.setdefault(parent, []).append(node)
    places: dict[int, tuple[int, float]] = {}
    num_leaves = 0

    def place(node: int, depth: int) -> float:
        nonlocal num_leaves
        if heights := [place(child, depth + 1) for child in children.get(node, [])]:
            height = sum(heights) / len(heights)
        else:
            height, num_leaves = -float(num_leaves), num_leaves + 1
        places[node] = (depth, height)
        return height

    place(0, 0)
    return places


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
