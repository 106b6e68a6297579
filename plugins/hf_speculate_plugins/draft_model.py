"""A smaller causal LM of the same vocabulary as the drafter.

Sources: Leviathan et al. (arXiv:2211.17192), Chen et al. (arXiv:2302.01318) for drafting with a smaller model; trees
as in EAGLE-2, see `growth`. The drafter keeps its own KV cache and runs one tight loop of forwards, never `generate`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_speculate.cache import TreeCache
from hf_speculate.drafting import Conversations, Drafter, DraftRequest, DraftSession, DraftState, Knobs, common_prefix
from hf_speculate.errors import CheckpointError, TargetMismatchError
from hf_speculate.target import Scorer, num_positions, supported_shape, takes_position_ids
from hf_speculate.transfers import to_device
from hf_speculate.tree import DraftTree

from .checkpoints import read_config, tensor_shapes
from .growth import Frontier, grow_tree
from .values import Values


if TYPE_CHECKING:
    from typing_extensions import Self


_SIZES = ("num_hidden_layers", "vocab_size", "intermediate_size", "hidden_size")
_MAX_PACKED = 32
_HEAD_TENSORS = ("fc.", "fusion_fc.", "midlayer.", "medusa_head.", "hidden_norm.")


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftModelOptions:
    """Options of draft-model drafting.

    Attributes:
        depth: tokens drafted along a branch; each costs one forward of the draft model.
        top_k: 1 drafts a chain, more a dynamic tree with that many branches a level.
        max_nodes: draft nodes of a tree (not used by chains).
    """

    depth: int = 5
    top_k: int = 1
    max_nodes: int = 16

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"draft_model: {name} must be at least 1, got {getattr(self, name)}.")


class DraftModelDrafter(Drafter):
    """Drafts with a causal LM.

    Args:
        model: the draft model; its vocabulary must be the target's (padding rows at the end may differ).
        options: see `DraftModelOptions`.
    """

    name = "draft_model"
    knobs = Knobs(depth="depth", width="top_k", nodes="max_nodes", explored={"depth": 12, "top_k": 8, "max_nodes": 64})

    def __init__(self, model: PreTrainedModel, options: DraftModelOptions | None = None):
        shape, reason = supported_shape(model, DynamicCache(config=model.config))
        if shape == "single":
            raise TargetMismatchError(f"{type(model).__name__} cannot be a draft model: {reason}.")
        self.model = model.eval()
        self.options = options or DraftModelOptions()
        self.conversations: Conversations[TreeCache] = Conversations()

    def __repr__(self) -> str:
        return f"DraftModelDrafter({type(self.model).__name__}, {self.options})"

    @classmethod
    def for_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        """`model=` is the draft model or its path / Hub id; the other options are `DraftModelOptions`."""
        model = options.pop("model", None)
        if model is None:
            raise TypeError("draft_model needs the draft model: from_name('draft_model', target=..., model=...).")
        if isinstance(model, str | os.PathLike):
            loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=target.dtype)
            model = loaded.to(target.device)
        return cls(model, DraftModelOptions(**options))

    @classmethod
    def recognizes(cls, folder: str) -> bool:
        """A checkpoint whose config names a causal LM, and whose tensors hold no heads of another method."""
        config = read_config(folder)
        names = Values(folder, config).texts("architectures")
        is_head = any(key in config for key in ("draft_vocab_size", "medusa_num_heads", "speculators_model_type"))
        if is_head or "model_type" not in config or not any(n.endswith("ForCausalLM") for n in names):
            return False
        # EAGLE-1 heads have the config of a Llama of one layer: only their tensors tell.
        return not any(name.startswith(_HEAD_TENSORS) for name in tensor_shapes(folder))

    @classmethod
    def from_folder(cls, folder: str, target: PreTrainedModel, **options: Any) -> Self:
        """Loads the draft model beside the target: same dtype, same device."""
        parsed = DraftModelOptions(**options)
        _check_sizes(folder)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype, trust_remote_code=False)
        except Exception as error:  # configs and files of models are wrong in more ways than transformers has errors
            raise CheckpointError(f"cannot load a draft model from {folder}: {error}") from error
        return cls(loaded.to(target.device), parsed)

    def check_target(self, target: PreTrainedModel) -> None:
        """Compares vocabularies: sizes (padding rows aside) and special token ids."""
        ours, theirs = (m.config.get_text_config(decoder=True) for m in (self.model, target))
        # Checkpoints of one family pad the same tokenizer differently (Qwen2: 151936 and 152064 rows).
        if abs(ours.vocab_size - theirs.vocab_size) > 256:
            raise TargetMismatchError(
                f"the draft model has a vocabulary of {ours.vocab_size} tokens, the target of {theirs.vocab_size}: "
                "a draft model must share the target's tokenizer."
            )
        for name in ("bos_token_id", "eos_token_id"):
            mine, its = (_as_set(getattr(config, name, None)) for config in (ours, theirs))
            if mine and its and not mine & its:
                raise TargetMismatchError(
                    f"the draft model's {name} is {sorted(mine)}, the target's {sorted(its)}: they seem to have "
                    "different tokenizers; a draft model must share the target's."
                )

    def start(self, request: DraftRequest) -> DraftModelSession:
        return DraftModelSession(self, request)


def _check_sizes(folder: str) -> None:
    """Raises `CheckpointError` for a config that announces far more than the files hold: it would be made first."""
    shapes, config = tensor_shapes(folder), read_config(folder)
    nested = config.get("text_config")
    values = nested if isinstance(nested, dict) else config
    sizes = {name: size for name in _SIZES if isinstance(size := values.get(name), int)}
    # Weights of a few bits are packed, several in one value.
    most = _MAX_PACKED * sum(math.prod(shape) for shape in shapes.values())
    products = [("num_hidden_layers", sizes.get("num_hidden_layers", 0), len(shapes))]
    products += [(name, sizes.get(name, 0) * sizes.get("hidden_size", 1), most) for name in _SIZES[1:3]]
    for name, announced, stored in products:
        if shapes and announced > stored:
            raise CheckpointError(
                f"{folder}: {name} in config.json is {sizes[name]}, of which the {len(shapes)} tensors there do not "
                "hold the weights."
            )


def _as_set(ids: int | Sequence[int] | None) -> set[int]:
    if ids is None:
        return set()
    return {ids} if isinstance(ids, int) else set(ids)


class DraftModelSession(DraftSession):
    """The draft model's cache and what it holds.

    `_texts[r]` are the committed tokens behind the prompt (root last), `_cached[r]` those in the cache behind the
    prompt, which may go on with rejected drafts: what the two have in common stays, the rest is fed again.
    """

    def __init__(self, drafter: DraftModelDrafter, request: DraftRequest):
        self.options = drafter.options
        self.model = drafter.model
        self._vocab_size = request.target.config.get_text_config(decoder=True).vocab_size
        self._num_positions = num_positions(self.model.config)
        batch_size, num_prompt = request.input_ids.shape
        cache = DynamicCache(config=self.model.config)
        shape, _ = supported_shape(self.model, cache)
        mask = None if request.attention_mask is None else request.attention_mask[:, -num_prompt:]
        self._conversations, self._target_cache = drafter.conversations, request.cache
        text = request.text
        prompt = request.input_ids if text is None else torch.tensor([text], device=request.input_ids.device)
        num_prompt, self._has_text = prompt.shape[1], text is not None
        self.cache = self._resumed(text) or TreeCache(cache, batch_size)
        self.scorer = Scorer(self.model, self.cache, mask, shape)
        # The target may know tokens that the draft model lacks (rows of padding, as a rule): any other stands for them.
        self._last_token = self.model.config.get_text_config(decoder=True).vocab_size - 1
        self._prompt, self._prompt_mask = prompt.clamp(max=self._last_token), mask
        self._num_prompt = num_prompt
        self._has_read_prompt = False
        self._texts: list[list[int]] = [[] for _ in range(batch_size)]
        self._cached: list[list[int]] = [[] for _ in range(batch_size)]
        self._run_chain: tuple[list[int], DraftTree] | None = None  # drafted last, and not noted in `_cached` yet
        # Position of the last prompt token of each row.
        self._last_positions = [num_prompt - 1] * batch_size if mask is None else (mask.sum(-1) - 1).tolist()

    def observe(self, tokens, features, lengths) -> None:
        if not self._has_read_prompt:
            self._has_read_prompt = True
            if self._depth_limit(range(len(self._texts))) is not None:
                self._prefill()
            lengths_list = [1] * len(self._texts)
            tokens = tokens.gather(1, lengths[:, None] - 1)
        else:
            lengths_list = lengths.tolist()
        tokens = tokens.clamp(max=self._last_token)
        for text, row, length in zip(self._texts, tokens.tolist(), lengths_list, strict=True):
            text.extend(row[:length])

    def draft(self, state: DraftState) -> DraftTree:
        self._note_chain()
        limit = self._depth_limit([row for row, is_active in enumerate(state.active) if is_active])
        if limit is not None:
            self.scorer.leave_out([row for row, is_active in enumerate(state.active) if not is_active])
            limit = self._depth_limit(self.cache.rows)  # rows that have ended may have stayed
        if limit is None:
            return DraftTree.root_only(state.root_ids)
        rows, depth = self.cache.rows, min(self.options.depth, state.max_depth, limit + 1)
        root_logits = self._feed_committed()
        is_chain = self.options.top_k == 1 or state.chains_only or self.scorer.shape == "chain"
        draft = self._draft_chain if is_chain else self._draft_tree
        return state.whole_tree(draft(state.select(rows), root_logits, depth), rows)

    def _depth_limit(self, rows: Sequence[int]) -> int | None:
        """How deep nodes may be that the draft model runs; None: not even the root has a position that it knows."""
        size = self._num_positions
        if size is None:
            return 10**9
        longest = max(self._last_positions[row] + len(self._texts[row]) for row in rows)
        if not takes_position_ids(self.model):  # it counts entries: padding, and the gaps behind shorter rows
            common = [self._num_common(row) for row in rows]
            num_new = max(len(self._texts[row]) - known for row, known in zip(rows, common, strict=True))
            longest = self._num_prompt - 1 + max(common) + num_new
        return size - 1 - longest if longest < size else None

    def _num_common(self, row: int) -> int:
        """Committed tokens behind the prompt, but the root, that the cache holds."""
        return common_prefix(self._texts[row][:-1], self._cached[row])

    @property
    def _positions(self) -> list[int]:
        """Position of the token that comes after the cached ones, a row."""
        return [last + 1 + len(cached) for last, cached in zip(self._last_positions, self._cached, strict=True)]

    def _logits(self, output) -> Tensor:
        """Without the columns that the target's vocabulary does not have."""
        return output.logits[..., : self._vocab_size]

    def _resumed(self, text: list[int] | None) -> TreeCache | None:
        """The draft model's cache of the last turn, cut to what the text has kept of it."""
        carried = self._conversations.take(self._target_cache, text)
        if carried is None:
            return None
        num_alike, cache = carried
        if num_alike < cache.shortest_length:  # sliding windows have moved on
            return None
        cache.truncate([num_alike])
        return cache

    def _prefill(self) -> None:
        """Runs the prompt, as far as the cache lacks it."""
        device, start = self.model.device, self.cache.append_index
        if start == self._num_prompt:
            return
        positions = None
        if self._prompt_mask is not None:
            positions = (self._prompt_mask.long().cumsum(-1) - 1).clamp(min=0).to(device)
        with torch.no_grad():
            self.model(
                input_ids=self._prompt[:, start:].to(device),
                attention_mask=None if self._prompt_mask is None else self._prompt_mask.to(device),
                position_ids=positions,
                past_key_values=self.cache.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        self.cache.commit_appended()

    def close(self) -> None:
        """Leaves the cache to the next turn."""
        if self._has_text and self._has_read_prompt and self._target_cache is not None:
            self._note_chain()
            self.cache.restore()
            text = self._prompt[0].tolist() + self._cached[0]
            self._conversations.keep(self._target_cache, text[: self.cache.append_index], self.cache)

    def _feed_committed(self) -> Tensor:
        """Runs the committed tokens that the cache lacks, the root at least; returns the root's logits [R, V]."""
        new: dict[int, list[int]] = {}
        for row in self.cache.rows:
            common = self._num_common(row)
            del self._cached[row][common:]
            new[row] = self._texts[row][common:]
        self.cache.truncate([self._num_prompt + len(cached) for cached in self._cached])
        tree = DraftTree.from_rows([(tokens, range(-1, len(tokens) - 1)) for tokens in new.values()])
        output = self.scorer(tree, self._positions)
        self.cache.keep([range(len(new.get(row, ()))) for row in range(len(self._texts))])
        for row, tokens in new.items():
            self._cached[row].extend(tokens)
        last = to_device([len(tokens) - 1 for tokens in new.values()], output.logits.device)
        return self._logits(output)[torch.arange(len(new), device=last.device), last]

    def _draft_chain(self, state: DraftState, logits: Tensor, depth: int) -> DraftTree:
        columns = [to_device(state.root_ids, logits.device)]
        path = [[0] if row in self.cache.rows else [] for row in range(len(self._texts))]
        for level in range(depth):
            if level:
                output = self.scorer(DraftTree.root_only(columns[-1]), [p + level - 1 for p in self._positions])
                self.cache.keep(path)
                logits = self._logits(output)[:, 0]
            columns.append(state.child_scores(logits[:, None], depth=level)[:, 0].argmax(-1))
        self._run_chain = list(self.cache.rows), DraftTree.chain(torch.stack(columns, dim=1))
        return self._run_chain[1]

    def _note_chain(self) -> None:
        """What the cache holds of the last chain: by now the loop has read it, and nobody waits for the device."""
        if self._run_chain is not None:
            (rows, chain), self._run_chain = self._run_chain, None
            for row, drafted in zip(rows, chain.host.token_ids, strict=True):
                self._cached[row].extend(drafted[1:-1])

    def _draft_tree(self, state: DraftState, logits: Tensor, depth: int) -> DraftTree:
        positions = self._positions

        def expand(frontier: Frontier) -> Tensor:
            output = self.scorer(frontier.forest, positions, num_cached=frontier.num_cached)
            return state.child_scores(self._logits(output), depth=frontier.depth)

        tree = grow_tree(
            state.root_ids,
            state.child_scores(logits[:, None], depth=0)[:, 0],
            expand,
            depth=depth,
            top_k=self.options.top_k,
            max_nodes=self.options.max_nodes,
        )
        self.cache.restore()
        return tree
