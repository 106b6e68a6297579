#!/usr/bin/env python
"""Draws who imports whom, from the imports themselves: `docs/whole.svg` and, of the engine alone, `docs/rooms.svg`.

    python docs/generate.py            # writes both and prints the counts; `make docs` does

A room of the engine is a package or a module right below `hf_speculate/`; `__init__`, the face of the whole, is left
out. The rooms of the whole are listed below. A room stands above all that it imports; rooms that import each other
stand side by side. Dark arrows are enough to reach everything that is imported by way of others, faint ones are the
rest. Imports for type checking count. `tests/docs/test_rooms.py` fails when a picture is stale.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path


HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "hf_speculate"
PICTURE = HERE / "rooms.svg"

PLUGINS = HERE.parent / "plugins"
HOUSES = (
    PACKAGE,
    *(PLUGINS / f"hf_speculate_{name}" for name in ("gguf", "plugins", "tools")),
    HERE.parent / "training/hf_speculate_training",
)
WHOLE_PICTURE = HERE / "whole.svg"
# Beginnings of module names; the longest one that fits gives the room.
WHOLE = {
    "hf_speculate_training": "training",
    "hf_speculate_tools": "commands",
    "hf_speculate_tools.hub": "cards, uploads",
    "hf_speculate_plugins": "drafters",
    "hf_speculate_plugins.heads": "head files",
    "hf_speculate_plugins.checkpoints": "head files",
    "hf_speculate_plugins.origin": "head files",
    "hf_speculate_gguf": "GGUF files",
    "hf_speculate_gguf.native": "kernel",
    "hf_speculate_gguf.gpu": "kernel",
    **dict.fromkeys(
        (f"hf_speculate.{name}" for name in ("request", "speculator", "custom_generate", "testing")), "request"
    ),
    **dict.fromkeys((f"hf_speculate.{name}" for name in ("loop", "policy")), "loop, policy"),
    "hf_speculate.drafting": "drafting",
    **dict.fromkeys(
        (f"hf_speculate.{name}" for name in ("target", "attention", "forward", "graphs", "verification", "cache")),
        "score and verify",
    ),
    **dict.fromkeys(
        (
            f"hf_speculate.{name}"
            for name in (
                "tree",
                "stats",
                "files",
                "errors",
                "messages",
                "transfers",
                "compatibility",
                "triton_support",
            )
        ),
        "trees, values",
    ),
}

Graph = Mapping[str, frozenset[str]]

_BOX_WIDTH, _BOX_HEIGHT, _GAP, _LAYER_GAP, _MARGIN = 118, 34, 14, 52, 20
_MIN_COLUMNS, _MAX_COLUMNS = 6, 9
_SWEEPS = 8


@dataclass(frozen=True)
class Rooms:
    """What is drawn.

    Attributes:
        imports: the rooms that every room imports.
        num_modules: of every room.
        num_top: modules right below the package, `__init__` counted.
        largest: the longest module below the package, and its lines.
    """

    imports: Graph
    num_modules: Mapping[str, int]
    num_top: int
    largest: tuple[str, int]

    @property
    def num_arrows(self) -> int:
        return sum(map(len, self.imports.values()))

    @property
    def counts(self) -> str:
        name, lines = self.largest
        return (
            f"{len(self.imports)} rooms, {self.num_arrows} arrows; {self.num_top} modules at the top level; "
            f"largest module: {name}, {lines} lines"
        )


def read_rooms(package: Path) -> Rooms:
    """The rooms of a package, from its files."""
    return _read([package], lambda module: _room(module, package.name))


def read_whole() -> Rooms:
    """The rooms of the whole wheel. Imports of the engine from other houses are late ones, which pyproject.toml names;
    they are left out."""
    return _read(HOUSES, _room_of_whole)


def _room_of_whole(module: str) -> str | None:
    """The room of a module; None for the faces of the engine."""
    beginnings = [name for name in WHOLE if f"{module}.".startswith(f"{name}.")]
    return WHOLE[max(beginnings, key=len)] if beginnings else None


def _read(packages: Sequence[Path], room_of: Callable[[str], str | None]) -> Rooms:
    files = [(path, package) for package in packages for path in sorted(package.rglob("*.py"))]
    modules = {_module(path, package) for path, package in files}
    imports: dict[str, set[str]] = {}
    num_modules: dict[str, int] = {}
    for path, package in files:
        room = room_of(_module(path, package))
        if room is not None:
            num_modules[room] = num_modules.get(room, 0) + 1
            names = [
                name
                for name in _imported(path, package, modules)
                if package != packages[0] or name.partition(".")[0] == package.name
            ]
            imports.setdefault(room, set()).update(set(map(room_of, names)) - {room, None})  # type: ignore[arg-type]
    lengths = {
        str(path.relative_to(package)): len(path.read_text(encoding="utf-8").splitlines()) for path, package in files
    }
    largest = min(lengths, key=lambda name: (-lengths[name], name))
    return Rooms(
        imports={room: frozenset(found) for room, found in sorted(imports.items())},
        num_modules=num_modules,
        num_top=sum(path.parent in packages for path, _ in files),
        largest=(largest, lengths[largest]),
    )


def _module(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _room(module: str, package: str) -> str | None:
    """The room of a module; None for the package itself and for what is not in it."""
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] or None if first == package else None


def _imported(path: Path, package: Path, modules: Iterable[str]) -> Iterator[str]:
    """Names of modules that a file imports, wherever in it; of `from a import b` the module `a.b` if there is one."""
    known = set(modules)
    here = path.relative_to(package.parent).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base


def layers(imports: Graph) -> list[list[str]]:
    """The rooms, top layer first: each as low as what it imports allows."""
    group = _groups(imports)
    below = {g: {group[t] for r in imports if group[r] == g for t in imports[r]} - {g} for g in set(group.values())}
    height: dict[str, int] = {}

    def measure(name: str) -> int:
        if name not in height:
            height[name] = 1 + max(map(measure, sorted(below[name])), default=-1)
        return height[name]

    tallest = max(map(measure, sorted(below)), default=-1)
    rows = [sorted(r for r in imports if height[group[r]] == level) for level in range(tallest, -1, -1)]
    return _untangled(rows, imports)


def _groups(imports: Graph) -> dict[str, str]:
    """Room -> first by name of those that it reaches and that reach it: rooms of a circle stand together."""
    reached = {room: _reachable(room, imports) | {room} for room in imports}
    return {room: min(other for other in reached[room] if room in reached[other]) for room in imports}


def _reachable(start: str, imports: Graph) -> frozenset[str]:
    found: set[str] = set()
    to_do = list(imports[start])
    while to_do:
        room = to_do.pop()
        if room not in found:
            found.add(room)
            to_do.extend(imports[room])
    return frozenset(found)


def _untangled(rows: list[list[str]], imports: Graph) -> list[list[str]]:
    """Rooms of a layer in the order of the mean place of their neighbours, down and up a few times."""
    neighbours: dict[str, set[str]] = {room: set(found) for room, found in imports.items()}
    for room, found in imports.items():
        for other in found:
            neighbours[other].add(room)
    for _ in range(_SWEEPS):
        place = {room: (i + 0.5) / len(row) for row in rows for i, room in enumerate(row)}
        for row in rows:

            def mean(room: str, place: Mapping[str, float] = place) -> float:
                return round(sum(place[n] for n in neighbours[room]) / max(len(neighbours[room]), 1), 6)

            row.sort(key=lambda room: (mean(room), room))
    return rows


def direct(imports: Graph) -> set[tuple[str, str]]:
    """Arrows that no way by other rooms stands for; of circles, all."""
    reached = {room: _reachable(room, imports) for room in imports}
    return {
        (room, other)
        for room, found in imports.items()
        for other in found
        if room in reached[other] or not any(other in reached[by] for by in found - {other})
    }


def draw(rooms: Rooms) -> str:
    """The picture, SVG."""
    lines = [line for row in layers(rooms.imports) for line in _wrapped(row)]
    width = 2 * _MARGIN + max(_MIN_COLUMNS, *map(len, lines)) * (_BOX_WIDTH + _GAP) - _GAP
    place: dict[str, tuple[float, float]] = {}
    for number, line in enumerate(lines):
        for index, room in enumerate(line):
            center = _MARGIN + (width - 2 * _MARGIN) * (index + 0.5) / len(line)
            place[room] = center - _BOX_WIDTH / 2, _MARGIN + number * (_BOX_HEIGHT + _LAYER_GAP)
    height = 2 * _MARGIN + len(lines) * (_BOX_HEIGHT + _LAYER_GAP) - _LAYER_GAP + 26
    kept = direct(rooms.imports)
    arrows = sorted((pair in kept, *pair) for pair in ((r, o) for r, found in rooms.imports.items() for o in found))
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f"<title>Rooms of hf_speculate: {escape(rooms.counts)}</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#37474f"/></marker></defs>',
        *(_arrow(place[room], place[other], is_kept) for is_kept, room, other in arrows),
        *(_box(room, place[room], rooms.num_modules[room]) for row in lines for room in row),
        f'<text x="{_MARGIN}" y="{height - 12}" font-size="12" fill="#37474f">{escape(rooms.counts)}</text>',
        "</svg>",
    ]
    return "\n".join(drawn) + "\n"


def _wrapped(row: list[str]) -> list[list[str]]:
    """A layer as lines of boxes of about equal length."""
    count = -(-len(row) // _MAX_COLUMNS)
    return [row[len(row) * i // count : len(row) * (i + 1) // count] for i in range(count)]


def _box(room: str, corner: tuple[float, float], num_modules: int) -> str:
    left, top = corner
    center = left + _BOX_WIDTH / 2
    count = f"{num_modules} modules" if num_modules > 1 else "1 module"
    fill = "#e8eaf6" if num_modules > 1 else "#fafafa"
    return (
        f'<g><rect x="{left:g}" y="{top:g}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="5" fill="{fill}" '
        f'stroke="#3f51b5"/><g text-anchor="middle"><text x="{center:g}" y="{top + 15:g}" font-size="13">{escape(room)}'
        f'</text><text x="{center:g}" y="{top + 28:g}" font-size="9" fill="#607d8b">{count}</text></g></g>'
    )


def _arrow(start: tuple[float, float], end: tuple[float, float], is_kept: bool) -> str:
    """From the lower edge of the box that imports; within a layer, from below in a bow."""
    x1, y1 = start[0] + _BOX_WIDTH / 2, start[1] + _BOX_HEIGHT
    x2, y2 = end[0] + _BOX_WIDTH / 2, end[1]
    bend = _LAYER_GAP * 0.6
    if y2 < y1:
        y2 += _BOX_HEIGHT
        path = f"M{x1:g} {y1:g} C{x1:g} {y1 + bend:g} {x2:g} {y2 + bend:g} {x2:g} {y2:g}"
    else:
        path = f"M{x1:g} {y1:g} C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2:g}"
    style = 'stroke="#37474f" stroke-width="1.3" marker-end="url(#tip)"' if is_kept else 'stroke="#cfd8dc"'
    return f'<path d="{path}" fill="none" {style}/>'


def main() -> None:
    for picture, rooms in ((PICTURE, read_rooms(PACKAGE)), (WHOLE_PICTURE, read_whole())):
        picture.write_text(draw(rooms), encoding="utf-8")
        sys.stdout.write(f"{picture.name}: {rooms.counts}\n")


if __name__ == "__main__":
    main()
