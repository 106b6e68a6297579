"""The trial of a model class: does it score drafts as stock's loop scores one token after another?

Stock's loop lets a model prepare the inputs of every step; ours makes the inputs of a tree itself. A model with its own
preparation, or its own handling of masks and positions, may get other inputs there. So an unknown model is tried with a
few tokens before its first request. Stock's loop and ours generate a tiny left-padded batch of given tokens. Its drafts
are accepted, accepted in part, and rejected. Equal logits over trees allow trees; equal logits along chains allow
chains; otherwise the model gets no drafts.

A trial leaves no trace: it has its own cache, keeps the RNG, needs no gradients and calls no hook of the user.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from functools import cache
from importlib.resources import files
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import Cache

from ..drafting import Drafter, DraftRequest, DraftSession, DraftState
from ..errors import UnsupportedRequestError
from ..forward import has_recurrent_layers, target_shape
from ..messages import get_logger
from ..speculator import Speculator
from ..target import (
    GenerativeModel,
    Shape,
    has_foreign_attention,
    has_own_method,
    input_device,
    native_runner,
    prompt_learning,
    structure_key,
    without_foreign_hooks,
)
from ..tree import ROOT_PARENT, DraftTree
from ..verification import RngState


logger = get_logger(__name__)

INPUT_PREPARATION = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""Methods of stock's loop that ours does not call after the prompt."""

_LENGTHS = (5, 3)
_NEW_TOKENS = 9
_NUM_IDS = 24

# Largest difference of logits that counts as rounding, relative to the largest logit.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
_TOLERANCE_16_BIT = 4e-2

_shape_on_trial: ContextVar[Shape | None] = ContextVar("hf_speculate_shape_on_trial", default=None)
_found: WeakKeyDictionary[GenerativeModel, dict[tuple[Any, ...], tuple[Shape, str]]] = WeakKeyDictionary()


def request_shape(model: GenerativeModel, cache: Cache) -> tuple[Shape, str]:
    """The widest draft that `model` scores correctly on `cache`, and why it is not wider ("" for trees).

    It runs the trial if one is needed and has not run yet.
    """
    shape, reason = target_shape(model, cache)
    if (on_trial := _shape_on_trial.get()) is not None:
        return on_trial, reason
    if shape == "single" or not needs_trial(model, cache):
        return shape, reason
    key = (shape, structure_key(model), has_recurrent_layers(cache))
    known = _found.setdefault(model, {})
    if key not in known:
        known[key] = run_trial(model, shape, reason)
    return known[key]


def checked_shape(model: GenerativeModel, cache: Cache) -> tuple[Shape, str]:
    """The result of `request_shape`; raises `UnsupportedRequestError` if the model takes no drafts."""
    shape, reason = request_shape(model, cache)
    if shape == "single":
        raise UnsupportedRequestError(f"{reason}.")
    return shape, reason


@torch.no_grad()
def check_drafting(model: GenerativeModel) -> None:
    """Raises `UnsupportedRequestError` if `model` takes no drafts, as its requests would: a head that is trained for it
    could never draft. A request of a few tokens finds out."""
    with ExitStack() as stack:
        stack.callback(RngState(input_device(model)).put_back)
        request = _TrialRequest(model, None)
        request.logits(Speculator(_TrialDrafter(request), adaptive=False))


def needs_trial(model: GenerativeModel, cache: Cache) -> bool:
    """Whether this class must be tried: its input preparation is not stock's, or no test compares it with stock.

    Recurrent layers are always tried, and so are models whose forward or attention was replaced. Two cases are known
    and need no trial: prompt-learning adapters, which prepare inputs, and accelerate, which replaces forwards.
    """
    kind = type(model)
    if has_recurrent_layers(cache) or has_foreign_attention(model):
        return True
    for name in INPUT_PREPARATION:
        if has_own_method(model, name) or (name in vars(model) and prompt_learning(model) is None):
            return True
    if "forward" in vars(model) and native_runner(model) is None and not hasattr(model, "_hf_hook"):
        return True
    return not (kind.__module__.startswith("transformers.") and kind.__name__ in tried_classes(minor_version()))


def minor_version() -> str:
    """The minor version of transformers; classes may change with it."""
    return ".".join(transformers.__version__.split(".")[:2])


@cache
def tried_classes(version: str) -> frozenset[str]:
    """The classes that passed the architecture test with trees under this minor version of transformers."""
    text = files("hf_speculate.request").joinpath("tried_classes.json").read_text(encoding="utf-8")
    return frozenset(json.loads(text).get(version, ()))


def run_trial(model: GenerativeModel, shape: Shape, reason: str = "") -> tuple[Shape, str]:
    """Tries `shape`, then chains if it fails.

    Returns:
        The widest shape that works, and the reason why nothing wider (`request_shape`).
    """
    name, problem = type(model).__name__, ""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.callback(RngState(input_device(model)).put_back)
        stack.enter_context(without_foreign_hooks(model))
        for module in model.modules():
            if (deltas := vars(module).get("rope_deltas")) is not None:  # of the request, noted by its preparation
                stack.callback(setattr, module, "rope_deltas", deltas)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        try:
            request, expected = _plain(model)
        except Exception as error:
            return "single", f"{name} could not be tried with a few tokens ({_one_line(error)}): no drafts"
        for candidate in dict.fromkeys((shape, "chain")):
            problem = _difference(request, candidate, expected)
            if not problem:
                narrower = reason or f"{name} scores chains as one token after another, but no trees: chains only"
                return candidate, reason if candidate == shape else narrower
    return "single", f"{name} does not score several tokens at once as one after another ({problem}): no drafts"


def _plain(model: GenerativeModel) -> tuple[_TrialRequest, Tensor]:
    """A request and its logits in stock's loop.

    Models that give NaN for padding ("eager" in fp64) get a request without padding.
    """
    try:
        request = _TrialRequest(model, _LENGTHS)
        logits = request.logits(None)
        if logits.isfinite().all():
            return request, logits
    except ValueError:
        pass
    request = _TrialRequest(model, None)
    return request, request.logits(None)


def _difference(request: _TrialRequest, shape: Shape, expected: Tensor) -> str:
    """The difference that drafts of `shape` make, in words; "" if there is none."""
    token = _shape_on_trial.set(shape)
    try:
        logits = request.logits(Speculator(_TrialDrafter(request), adaptive=False))
    except Exception as error:
        return _one_line(error)
    finally:
        _shape_on_trial.reset(token)
    if logits.shape != expected.shape:
        return f"logits of shape {list(logits.shape)} instead of {list(expected.shape)}"
    allowed = _TOLERANCE.get(request.model.dtype, _TOLERANCE_16_BIT) * expected.abs().max()
    difference = (logits - expected).abs().max()
    return "" if difference <= allowed else f"logits differ by {difference:.2g}, rounding is {allowed:.2g}"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"


class _TrialRequest:
    """A left-padded batch of given tokens: each token is followed by the next in a ring of ids.

    Args:
        model: model to try. The request runs on a shallow copy with its own generation config.
        lengths: number of tokens of each row; None for two rows without padding and mask.
    """

    def __init__(self, model: GenerativeModel, lengths: Sequence[int] | None):
        self._lengths = lengths
        self.model = copy.copy(model)
        self.model.generation_config = GenerationConfig()
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        special = _special_ids(model)
        ids = dict.fromkeys(7919 * i % vocab_size for i in range(1, 4 * _NUM_IDS))
        self.ring = [token for token in ids if token not in special][:_NUM_IDS]
        if len(self.ring) < 4:
            raise ValueError(f"a vocabulary of {vocab_size} tokens")
        self._next = {token: self.ring[(i + 1) % len(self.ring)] for i, token in enumerate(self.ring)}
        self._wrong = {token: self.ring[(i + 3) % len(self.ring)] for i, token in enumerate(self.ring)}

    def next(self, token: int) -> int:
        """The token that follows another one."""
        return self._next.get(token, self.ring[0])

    def wrong(self, token: int) -> int:
        """A token that does not follow."""
        return self._wrong.get(token, self.ring[2])

    def logits(self, speculator: Speculator | None) -> Tensor:
        """float32 [steps, B, V], the logits of every step."""
        lengths = self._lengths or (4, 4)
        width = max(lengths)
        # Stock treats pad tokens as padding even without a mask, so texts avoid them.
        first, count = self.ring[0], len(self.ring)
        texts = [[self.ring[(2 * i + 1 + j) % count] for j in range(n)] for i, n in enumerate(lengths)]
        rows = [[first] * (width - len(text)) + text for text in texts]
        mask = [[0] * (width - n) + [1] * n for n in lengths]
        device = input_device(self.model)
        config = GenerationConfig(
            max_new_tokens=_NEW_TOKENS,
            do_sample=False,
            pad_token_id=first,
            return_dict_in_generate=True,
            output_logits=True,
        )
        output: Any = self.model.generate(
            input_ids=torch.tensor(rows, device=device, dtype=torch.long),
            **({"attention_mask": torch.tensor(mask, device=device, dtype=torch.long)} if self._lengths else {}),
            generation_config=config,
            logits_processor=LogitsProcessorList([_Given(self)]),
            speculator=speculator,
        )
        return torch.stack(output.logits).cpu()


def _special_ids(model: GenerativeModel) -> set[int]:
    """Token ids with a special meaning in the config, such as placeholders for images."""
    configs = (model.config, model.config.get_text_config(decoder=True))
    named = [value for config in configs for name, value in vars(config).items() if "token" in name]
    flat = [token_id for value in named for token_id in (value if isinstance(value, list | tuple) else [value])]
    return {token_id for token_id in flat if isinstance(token_id, int)}


class _Given(LogitsProcessor):
    """Chooses the token that follows the last one, whatever the model computes."""

    row_wise = True

    def __init__(self, request: _TrialRequest):
        self._request = request

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        chosen = torch.tensor(
            [[self._request.next(token)] for token in input_ids[:, -1].tolist()], dtype=torch.long, device="cpu"
        )
        return torch.full_like(scores, -1e4).scatter(1, chosen.to(scores.device), 0.0)


class _TrialDrafter(Drafter):
    """Drafts in turn what is accepted, accepted in part, and rejected, with another case in every row."""

    name = "trial"

    def __init__(self, request: _TrialRequest):
        self.request = request

    @classmethod
    def for_target(cls, target, **options: Any):
        raise NotImplementedError

    def start(self, request: DraftRequest) -> DraftSession:
        return _TrialSession(self.request)


class _TrialSession(DraftSession):
    def __init__(self, request: _TrialRequest):
        self._request = request
        self._num_rounds = 0

    def observe(self, tokens, features, lengths) -> None:
        pass

    def draft(self, state: DraftState) -> DraftTree:
        self._num_rounds += 1
        make = self._chain if state.chains_only else self._tree
        rows = [make(root, (self._num_rounds + row) % 3) for row, root in enumerate(state.root_ids.tolist())]
        return DraftTree.from_rows(rows).pruned([state.max_depth] * len(rows))

    def _chain(self, root: int, kind: int) -> tuple[Sequence[int], Sequence[int]]:
        right = self._request.next(root)
        second = self._request.next(right) if kind == 0 else self._request.wrong(right)
        return (root, right if kind < 2 else self._request.wrong(root), second), range(-1, 2)

    def _tree(self, root: int, kind: int) -> tuple[Sequence[int], Sequence[int]]:
        """Two branches of two nodes. The second one is right, right but for its end, or wrong."""
        _, first, second = self._chain(root, kind)[0]
        wrong = self._request.wrong(self._request.wrong(root))
        return (root, wrong, first, self._request.next(wrong), second), (ROOT_PARENT, 0, 0, 1, 2)
