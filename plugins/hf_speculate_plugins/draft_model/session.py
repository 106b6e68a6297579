"""One request of a draft model: its own KV cache, and one tight loop of forwards, never `generate`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_speculate.attention import tree_backends
from hf_speculate.cache import TreeCache, as_cache
from hf_speculate.drafting import Conversations, DraftRequest, DraftSession, DraftState, common_prefix
from hf_speculate.forward import Scorer
from hf_speculate.target import GenerativeModel, num_positions, supported_shape, takes_position_ids
from hf_speculate.transfers import to_device
from hf_speculate.tree import DraftTree

from ..trees import Frontier, best_log_probs, grow_tree
from .captured import captured_drafts
from .options import DraftModelOptions


class DraftModelSession(DraftSession):
    """The draft model's cache, and the tokens in it.

    `_texts[r]` are the committed tokens after the prompt (root last). `_cached[r]` are the tokens in the cache after
    the prompt, which may end in rejected drafts. The common prefix stays in the cache, and the rest runs again. So to
    undo a draft that was made ahead, it is enough to restore its text.
    """

    def __init__(
        self,
        model: GenerativeModel,
        options: DraftModelOptions,
        conversations: Conversations[TreeCache],
        request: DraftRequest,
    ):
        self.model, self.options = model, options
        self._vocab_size = request.target.config.get_text_config(decoder=True).vocab_size
        self._num_positions = num_positions(self.model.config)
        batch_size, num_prompt = request.input_ids.shape
        cache = DynamicCache(config=self.model.config)
        shape, _ = supported_shape(self.model, cache)
        mask = None if request.attention_mask is None else request.attention_mask[:, -num_prompt:]
        self._conversations, self._target_cache = conversations, request.cache
        text = request.text
        prompt = (
            request.input_ids
            if text is None
            else torch.tensor([text], device=request.input_ids.device, dtype=torch.long)
        )
        num_prompt, self._has_text = prompt.shape[1], text is not None
        self.cache = self._resumed(text) or TreeCache(cache, batch_size)
        self.scorer = Scorer(self.model, self.cache, mask, shape, record=request.record)
        # The target may have tokens that the draft model lacks, usually padding rows. Any other token replaces them.
        self._last_token = self.model.config.get_text_config(decoder=True).vocab_size - 1
        self._prompt, self._prompt_mask = prompt.clamp(max=self._last_token), mask
        self._captured = captured_drafts(self.scorer, request, options, mask)
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
        self._append([row[:length] for row, length in zip(tokens.tolist(), lengths_list, strict=True)])

    def _append(self, new: Sequence[Sequence[int]]) -> None:
        """Adds committed tokens to the text of each row."""
        for text, tokens in zip(self._texts, new, strict=True):
            text.extend(min(token, self._last_token) for token in tokens)

    def draft(self, state: DraftState) -> DraftTree:
        return self._draft_captured(state) or self._draft(state, self.options.depth)

    def ahead(self, state: DraftState, path: Sequence[int]) -> DraftTree:
        text = self._texts[0]
        num_committed = len(text)
        text.extend(min(token, self._last_token) for token in path)
        try:
            return self._draft(state, self.options.depth + 1)  # the right part of it stays in the cache
        finally:
            del text[num_committed:]

    def _draft_captured(self, state: DraftState) -> DraftTree | None:
        """The draft of one captured function; None if that is not possible."""
        depth, top_k = min(self.options.depth, state.max_depth), 1 if state.chains_only else self.options.top_k
        if self._captured is None or depth < 1:
            return None
        self._note_chain()
        new = self._uncached()
        if not self._captured.can_read(new.values()):
            self._feed_committed()
            new = self._uncached()  # the root alone
        draft = self._captured.draft(list(new.values()), self._positions, state, depth, top_k)
        if draft is not None:
            self._note_cached(new)
        return draft

    def _draft(self, state: DraftState, depth: int) -> DraftTree:
        self._note_chain()
        limit = self._depth_limit([row for row, is_active in enumerate(state.active) if is_active])
        if limit is not None:
            if self._captured is None:  # captured drafts have all rows
                self.scorer.leave_out([row for row, is_active in enumerate(state.active) if not is_active])
            limit = self._depth_limit(self.cache.rows)  # rows that have ended may have stayed
        if limit is None:
            return DraftTree.root_only(state.root_ids)
        rows, depth = self.cache.rows, min(depth, state.max_depth, limit + 1)
        return state.whole_tree(self._grow(state.select(rows), depth), rows)

    def _grow(self, state: DraftState, depth: int) -> DraftTree:
        """The draft of the rows in the cache."""
        root_logits = self._feed_committed()
        is_chain = self.options.top_k == 1 or state.chains_only or self.scorer.shape == "chain"
        return (self._draft_chain if is_chain else self._draft_tree)(state, root_logits, depth)

    def _depth_limit(self, rows: Sequence[int]) -> int | None:
        """Greatest depth of nodes that the draft model can run; None: it knows no position even for the root."""
        size = self._num_positions
        if size is None:
            return 10**9
        longest = max(self._last_positions[row] + len(self._texts[row]) for row in rows)
        if not takes_position_ids(self.model):  # it counts entries: padding, and the gaps after shorter rows
            common = [self._num_common(row) for row in rows]
            num_new = max(len(self._texts[row]) - known for row, known in zip(rows, common, strict=True))
            longest = self._num_prompt - 1 + max(common) + num_new
        return size - 1 - longest if longest < size else None

    def _num_common(self, row: int) -> int:
        """Number of committed tokens after the prompt, without the root, that the cache holds."""
        text, cached = self._texts[row][:-1], self._cached[row]
        if cached == text[: len(cached)]:  # as after every captured draft; much faster than the loop over tokens
            return len(cached)
        return common_prefix(text, cached)

    @property
    def _positions(self) -> list[int]:
        """Position of the token after the cached ones, for each row."""
        return [last + 1 + len(cached) for last, cached in zip(self._last_positions, self._cached, strict=True)]

    def _logits(self, output) -> Tensor:
        """The logits, without columns that the target's vocabulary does not have."""
        return output.logits[..., : self._vocab_size]

    def _resumed(self, text: list[int] | None) -> TreeCache | None:
        """The draft model's cache of the last turn, cut to the part that the text has kept; None if there is none."""
        carried = self._conversations.take(self._target_cache, text)
        if carried is None:
            return None
        num_alike, cache = carried
        if num_alike < cache.shortest_length:  # sliding windows have moved on
            return None
        cache.truncate([num_alike])
        return cache

    def _prefill(self) -> None:
        """Runs the part of the prompt that the cache lacks."""
        device, start = self.model.device, self.cache.append_index
        if start == self._num_prompt:
            return
        positions = None
        if self._prompt_mask is not None:
            positions = (self._prompt_mask.long().cumsum(-1) - 1).clamp(min=0).to(device)
        with torch.no_grad(), tree_backends(device):
            self.model(
                input_ids=self._prompt[:, start:].to(device),
                attention_mask=None if self._prompt_mask is None else self._prompt_mask.to(device),
                position_ids=positions,
                **as_cache(self.cache.cache),
                use_cache=True,
                logits_to_keep=1,
            )
        self.cache.commit_appended()

    def close(self) -> None:
        """Stores the cache for the next turn of the conversation."""
        if self._has_text and self._has_read_prompt and self._target_cache is not None:
            self._note_chain()
            self.cache.restore()
            text = self._prompt[0].tolist() + self._cached[0]
            self._conversations.keep(self._target_cache, text[: self.cache.append_index], self.cache)

    def _uncached(self) -> dict[int, list[int]]:
        """Cuts the cache to committed tokens; returns those that it lacks by row, the root at least."""
        new: dict[int, list[int]] = {}
        for row in self.cache.rows:
            common = self._num_common(row)
            del self._cached[row][common:]
            new[row] = self._texts[row][common:]
        self.cache.truncate([self._num_prompt + len(cached) for cached in self._cached])
        return new

    def _note_cached(self, new: dict[int, list[int]]) -> None:
        for row, tokens in new.items():
            self._cached[row].extend(tokens)

    def _feed_committed(self) -> Tensor:
        """Runs the committed tokens that the cache lacks, the root at least; returns the root's logits [R, V]."""
        new = self._uncached()
        tree = DraftTree.from_rows([(tokens, range(-1, len(tokens) - 1)) for tokens in new.values()])
        output = self.scorer(tree, self._positions)
        self.cache.keep([range(len(new.get(row, ()))) for row in range(len(self._texts))])
        self._note_cached(new)
        last = to_device([len(tokens) - 1 for tokens in new.values()], output.logits.device)
        return self._logits(output)[torch.arange(len(new), device=last.device, dtype=torch.long), last]

    def _draft_chain(self, state: DraftState, logits: Tensor, depth: int) -> DraftTree:
        columns = [to_device(state.root_ids, logits.device)]
        values = [torch.zeros(len(columns[0]), device=logits.device, dtype=torch.float32)]
        path = [[0] if row in self.cache.rows else [] for row in range(len(self._texts))]
        for level in range(depth):
            if level and not state.should_continue(values[-1][:, None]):
                break
            if level:
                output = self.scorer(DraftTree.root_only(columns[-1]), [p + level - 1 for p in self._positions])
                self.cache.keep(path)
                logits = self._logits(output)[:, 0]
            log_probs, best = best_log_probs(state.child_scores(logits[:, None], depth=level)[:, 0], 1)
            columns.append(best[:, 0])
            values.append(values[-1] + log_probs[:, 0])
        chain = DraftTree.chain(torch.stack(columns, dim=1), torch.stack(values, dim=1))
        self._run_chain = list(self.cache.rows), chain
        return self._run_chain[1]

    def _note_chain(self) -> None:
        """Notes the tokens of the last chain in the cache. The loop has read them by now: this waits for no device."""
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
            should_continue=state.should_continue,
        )
        self.cache.restore()
        return tree
