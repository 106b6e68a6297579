"""Phase `speed`: tokens per second of stock and of us, on random weights of real shapes and on pycoder.

Drafts of the random models are scripted: they are accepted to depth 1, 2, … in set shares of the rounds. The script
costs no device time. What a real head costs is measured by a scripted drafter that runs one in addition.

Cells come in the order of their importance, so that a phase that runs out of time leaves out the last ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_speculate.drafting import Drafter
from hf_speculate.speculator import Speculator
from hf_speculate.target import GenerativeModel
from hf_speculate.testing import EmptyDrafter

from ..benchmarks.scripted import AcceptanceProfile
from ..benchmarks.shapes import ModelShape
from .cells import STATIC, Cell
from .models import build, load_pycoder, prompts, pycoder_head, random_head, random_prompts, shape_of
from .parts import MarkedDrafter, parts_of
from .profiling import profiled
from .setting import Setting
from .timing import Marks


RATES = (0.8, 0.65, 0.5, 0.35, 0.2)
NODES = (8, 16)  # of a tree, its root included
NEW_TOKENS, PROMPT, BATCH = 96, 256, 8
LONG_PROMPT, LONG_TOKENS = 8192 - 64, 32
_PROFILED_TOKENS = 12
NOTHING, USELESS, WITH_HEAD = "nothing drafted", "automatic, nothing accepted", "16 nodes and a head"
_TINY = {"count": 8, "prompt": 12, "batch": 2, "long_prompt": 40, "long_count": 6}
# Seconds that each step is expected to take at least on an H100. It is left out if fewer are left.
_CELL_SECONDS, _COMPILE_SECONDS = 12.0, 20.0
# Calls after the first one that are not timed, by mode.
_WARM_UPS = {"eager": 0, "recorded": 2, "compiled": 2}


def measure(setting: Setting) -> None:
    """Writes findings for every cell: one for each way, then the parts of a round."""
    run = _Speed(setting)
    steps: dict[str, tuple[float, Callable[[], None]]] = {
        "0.5B": (_COMPILE_SECONDS, lambda: run.shape("0.5B")),
        "8B": (_COMPILE_SECONDS, lambda: run.shape("8B")),
        "8B with a head": (_CELL_SECONDS, run.head),
        "8B, 8k context": (_CELL_SECONDS, run.long_context),
        "pycoder": (_CELL_SECONDS, run.pycoder),
        "0.5B, batch 8": (_COMPILE_SECONDS, run.batch),
        "0.5B, compiled": (_COMPILE_SECONDS, lambda: run.compiled("0.5B")),
        "8B, compiled": (_COMPILE_SECONDS, lambda: run.compiled("8B")),
    }
    for name, (seconds, step) in steps.items():
        if setting.allows(0.0 if setting.is_tiny else seconds, name):
            with setting.guarded(cell=name):
                step()


def warm(setting: Setting, name: str) -> None:
    """Compiles what the cells of a shape compile. It fills inductor's cache on disk for another process."""
    run = _Speed(setting)
    if name == "pycoder":
        run.pycoder_cell().add_static()
        return
    cell = run.cell(name)
    cell.add_static()
    if name == "0.5B":
        run.batch_cell().add_static()
    run.add(cell, "compiled", 16)


class _Speed:
    """The cells, with the models that they share."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self.modes = setting.modes()
        self._seconds = setting.left
        self.models: dict[str, GenerativeModel] = {}
        self.cells: dict[str, Cell] = {}
        tiny = _TINY if setting.is_tiny else {}
        self.count, self.prompt = tiny.get("count", NEW_TOKENS), tiny.get("prompt", PROMPT)
        self.rows = tiny.get("batch", BATCH)
        self.long = tiny.get("long_prompt", LONG_PROMPT), tiny.get("long_count", LONG_TOKENS)

    def shape(self, name: str) -> None:
        """Stock and us at batch 1, with drafts and without."""
        cell = self.cell(name)
        cell.add_static()
        for mode in ("eager", "recorded"):
            for nodes in NODES if mode == "recorded" or name == "0.5B" else NODES[-1:]:
                self.add(cell, mode, nodes)
        self.add(cell, "recorded", NOTHING)
        self.add(cell, "recorded", USELESS)
        cell.measure(self._share(0.12))
        self.report(cell)
        self._parts(cell)
        if self.setting.on_cuda:
            self.setting.report(cell=name, memory_gib=torch.cuda.max_memory_allocated(self.setting.device) / 2**30)

    def head(self) -> None:
        """Rounds that also run a head of one layer, rounds without it, and steps in which nothing is drafted."""
        cell, names = self.cell("8B"), []
        inner = random_head(cell.model, self.shape_of("8B"))
        for mode in self._ours():
            drafter = self.profile(16).drafter(cell.texts, vocab_size=self._vocabulary("8B"), paid=inner)
            cell.add(f"{mode}, {WITH_HEAD}", self._speculator(drafter, mode), _WARM_UPS[mode])
            for kind in (16, NOTHING):
                if _name(mode, kind) not in cell.ways:
                    self.add(cell, mode, kind)
            names += [f"{mode}, {WITH_HEAD}", _name(mode, 16), _name(mode, NOTHING)]
        cell.measure(self._share(0.05), names)
        self.report(cell, names, "8B with a head")
        for mode in self._ours():
            marks = Marks(self.setting.device)
            paid = MarkedDrafter(inner, marks)
            drafter = self.profile(16).drafter(cell.texts, vocab_size=self._vocabulary("8B"), paid=paid)
            self._report_parts(cell, f"{mode}, {WITH_HEAD}", drafter, mode, marks)
            for way in (f"{mode}, {WITH_HEAD}", _name(mode, NOTHING)):
                with self.setting.guarded(cell=cell.name, way=way, profile=True):
                    found = profiled(cell.call(way, _PROFILED_TOKENS), self.setting.device)
                    self.setting.report(cell=cell.name, way=way, profile=found)

    def long_context(self) -> None:
        """A round after a long context, and a step in which nothing is drafted."""
        length, count = self.long
        ids = random_prompts(1, length, self.shape_of("8B"), self.setting.device)
        cell = Cell(self.setting, "8B, 8k context", self.model("8B"), ids, count)
        for mode in ("recorded", "eager"):
            self.add(cell, mode, 16, shape="8B")
            self.add(cell, mode, NOTHING)
        cell.measure(self._share(0.05))
        self.report(cell)

    def pycoder(self) -> None:
        """The bundled model with its own head."""
        cell = self.pycoder_cell()
        cell.add_static()
        for mode in self._ours():
            for name, adaptive in (("head", False), ("head, automatic", True)):
                speculator = pycoder_head(cell.model, compile=self.modes[mode], adaptive=adaptive)
                cell.add(f"{mode}, {name}", speculator, _WARM_UPS[mode])
        cell.measure(self._share(0.06))
        self.report(cell)

    def batch(self) -> None:
        """Stock and us with several rows."""
        cell = self.batch_cell()
        cell.add_static()
        for mode in ("recorded", "eager"):
            self.add(cell, mode, 8, shape="0.5B")
        cell.measure(self._share(0.07))
        self.report(cell)

    def compiled(self, name: str) -> None:
        """Inductor in addition to recording, next to the recorded and stock's ways."""
        cell = self.cell(name)
        self.add(cell, "compiled", 16)
        self.add(cell, "compiled", NOTHING)
        ours = [_name(mode, kind) for mode in ("compiled", "recorded") for kind in (16, NOTHING)]
        cell.measure(self._share(0.05), [STATIC, *ours])
        self.report(cell, [name for name in ours if name.startswith("compiled")])

    def cell(self, name: str) -> Cell:
        """The cell of a shape at batch 1, made at the first call."""
        if name not in self.cells:
            ids = random_prompts(1, self.prompt, self.shape_of(name), self.setting.device)
            self.cells[name] = Cell(self.setting, name, self.model(name), ids, self.count)
        return self.cells[name]

    def batch_cell(self) -> Cell:
        ids = random_prompts(self.rows, self.prompt, self.shape_of("0.5B"), self.setting.device)
        return Cell(self.setting, "0.5B, batch 8", self.model("0.5B"), ids, self.count)

    def pycoder_cell(self) -> Cell:
        model = load_pycoder(self.setting.device, torch.bfloat16)
        return Cell(self.setting, "pycoder", model, prompts(self.setting.device)[0], self.count)

    def add(self, cell: Cell, mode: str, kind: int | str, shape: str | None = None) -> None:
        """Adds one of our ways: trees of a number of nodes, nothing drafted, or drafts that are never accepted."""
        if mode not in self.modes:
            return
        drafter: Drafter = EmptyDrafter()
        if isinstance(kind, int):
            drafter = self.profile(kind).drafter(cell.texts, vocab_size=self._vocabulary(shape or cell.name))
        elif kind == USELESS:
            useless = AcceptanceProfile.of_nodes((0.0,) * len(RATES), 15)
            drafter = useless.drafter(cell.texts, vocab_size=self._vocabulary(shape or cell.name))
        cell.add(_name(mode, kind), self._speculator(drafter, mode, adaptive=kind == USELESS), _WARM_UPS[mode])

    def report(self, cell: Cell, names: list[str] | None = None, label: str | None = None) -> None:
        """Reports the ways of a cell, or some of them, under the name of the cell or another one."""
        for row in cell.rows():
            if names is None or row["way"] in names:
                self.setting.report(**row | {"cell": label or cell.name})

    def model(self, name: str) -> GenerativeModel:
        if name not in self.models:
            self.models[name] = build(self.shape_of(name), self.setting.device)
        return self.models[name]

    def shape_of(self, name: str) -> ModelShape:
        return shape_of(name, self.setting.is_tiny)

    @staticmethod
    def profile(nodes: int) -> AcceptanceProfile:
        """The set acceptance with trees of so many nodes, root included."""
        return AcceptanceProfile.of_nodes(RATES, nodes - 1)

    def _share(self, share: float) -> float:
        """A share of the time that the phase had at its begin."""
        return share * self._seconds

    def _vocabulary(self, name: str) -> int:
        return self.shape_of(name).vocab_size

    def _speculator(self, drafter: Drafter, mode: str, adaptive: bool = False) -> Speculator:
        return Speculator(drafter, compile=self.modes[mode], adaptive=adaptive)

    def _ours(self) -> list[str]:
        """The modes without a compiler that this version has."""
        return [mode for mode in ("recorded", "eager") if mode in self.modes]

    def _parts(self, cell: Cell) -> None:
        """Reports the parts of rounds that the script drafts for."""
        for mode in self._ours():
            drafter = self.profile(16).drafter(cell.texts, vocab_size=self._vocabulary(cell.name))
            self._report_parts(cell, _name(mode, 16), drafter, mode, Marks(self.setting.device))

    def _report_parts(self, cell: Cell, way: str, drafter: Drafter, mode: str, marks: Marks) -> None:
        marked = f"{way}, marked"
        with self.setting.guarded(cell=cell.name, way=marked):
            cell.add(marked, self._speculator(drafter, mode), _WARM_UPS[mode])
            if marked in cell.ways:
                marks.clear()
                found = parts_of(cell.call(marked), marks, self.setting.device)
                if "score" in found:
                    prompt_ms = 1e3 * cell.prompt_seconds(marked) / found["rounds"]
                    found["rest"] = found["call"] - prompt_ms - found["score"] - found.get("draft", 0.0)
                self.setting.report(cell=cell.name, way=way, parts_ms=found)
                del cell.ways[marked]


def _name(mode: str, kind: int | str) -> str:
    return f"{mode}, {kind} nodes" if isinstance(kind, int) else f"{mode}, {kind}"
