"""One request of a draft model of another vocabulary.

The draft model writes text in its own tokens, and the target's tokenizer splits that text. (To map token by token would
end a draft at the first token that only one vocabulary has.) The last word of the committed text may not be whole: its
tokens in the draft model's vocabulary would then be others. So the draft begins before that word, and the draft model
compares the tokens that are written with those that begin like the word and are longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_speculate.cache import TreeCache
from hf_speculate.drafting import Conversations, DraftRequest, DraftState
from hf_speculate.target import GenerativeModel
from hf_speculate.tree import DraftTree, TreeRow

from .options import DraftModelOptions
from .session import DraftModelSession
from .translation import ReadText, Translation


# Log-probability that a token stays although the draft may end in the middle of it. With drafts that are always right,
# it is 0.5 to 0.7 (Python, prose and Chinese in several pairs of vocabularies).
_OPEN_END = math.log(0.6)
# Longer tokens in the place of a committed one that are considered.
_MOST_LONGER = 8


class Draft:
    """The draft of one row: tokens of the draft model after the fixed ones, and the target's tokens for them.

    Args:
        translation: translation between the vocabularies.
        before: end of the committed text, from the beginning of a word on.
        written: number of bytes at the beginning of the first token that the committed text already has.

    Attributes:
        tokens: tokens of the draft model.
        value: log-probability of all of them.
        target_tokens: the target's tokens, whose values are in `target_values`.
        is_over: whether nothing can follow.
    """

    def __init__(self, translation: Translation, before: bytes, written: int):
        self._translation, self._before, self._written = translation, before, written
        self.tokens: list[int] = []
        self.target_tokens: list[int] = []
        self.target_values: list[float] = []
        self.value, self.is_over = 0.0, False
        self._text, self._values = b"", []

    def append(self, token: int, log_prob: float) -> None:
        """Adds a token of the draft model."""
        draft = self._translation.draft
        self.tokens.append(token)
        self.value += log_prob
        if draft.is_special(token) or not draft.text(token):
            self._end(self._translation.special_to_target(token))
            return
        added = draft.text(token) if len(self.tokens) > 1 else draft.text(token)[self._written :]
        self._text += added
        self._values += [self.value] * len(added)
        pieces = self._translation.to_target(self._before, self._text)
        self.target_tokens = [piece.token for piece in pieces]
        self.target_values = [self._values[piece.end - 1] for piece in pieces]
        is_whole = pieces and self._translation.target.text(pieces[-1].token) == draft.text(token)
        if pieces and not is_whole:
            self.target_values[-1] += _OPEN_END

    def _end(self, special: int | None) -> None:
        """Ends the draft, with the target's token for a special one."""
        self.is_over = True
        pieces = self._translation.to_target(self._before, self._text)
        self.target_values = [self._values[piece.end - 1] for piece in pieces]  # the last word is whole
        if special is not None and (pieces[-1].end if pieces else 0) == len(self._text):
            self.target_tokens.append(special)
            self.target_values.append(self.value)

    def nodes(self, root: int, depth: int, vocab_size: int) -> TreeRow:
        """The draft as a chain of at most `depth` nodes, whose tokens the target knows."""
        known = next((i for i, token in enumerate(self.target_tokens) if token >= vocab_size), depth)
        tokens, values = self.target_tokens[: min(known, depth)], self.target_values[: min(known, depth)]
        return TreeRow([root, *tokens], range(-1, len(tokens)), [0.0, *values])


class TranslatedSession(DraftModelSession):
    """A session whose draft model reads and writes its own vocabulary.

    The prompt of the cache is all but the last of the fixed tokens (`ReadText.num_fixed`). All later tokens are run
    again in every round, as the draft may begin after any of them; these are the last word's.
    """

    def __init__(
        self,
        model: GenerativeModel,
        options: DraftModelOptions,
        conversations: Conversations[TreeCache],
        request: DraftRequest,
        translation: Translation,
    ):
        self._translation = translation
        self._reads = [ReadText(translation, tokens) for tokens in request.row_texts]
        self._starts = [read.num_fixed - 1 for read in self._reads]
        super().__init__(model, options, conversations, self._as_read(request))
        self._num_target_tokens = self._vocab_size
        self._vocab_size = len(translation.draft.texts)
        device = self.model.device
        self._sorted_ids = translation.draft.sorted_ids.to(device)
        self._first_tokens: Tensor | None = None
        self._show_texts()

    def _as_read(self, request: DraftRequest) -> DraftRequest:
        """The request with the prompt that the draft model reads, left padded."""
        width, filler = max(self._starts), self._translation.filler
        rows = [
            [filler] * (width - start) + read.ids[:start] for read, start in zip(self._reads, self._starts, strict=True)
        ]
        device = request.input_ids.device
        mask = [[0] * (width - start) + [1] * start for start in self._starts]
        return replace(
            request,
            input_ids=torch.tensor(rows, dtype=torch.long, device=device),
            attention_mask=None if len(rows) == 1 else torch.tensor(mask, dtype=torch.long, device=device),
            position_ids=None,
            known_from=0,
            num_earlier=0,
            earlier_ids=None,
            graph_runner=None,
        )

    def ahead(self, state: DraftState, path: Sequence[int]) -> DraftTree:
        read = self._reads[0]
        before = read.state()
        try:
            self._append([path])
            return self._draft(state, self.options.depth + 1)
        finally:
            read.restore(before)
            self._show_texts()

    def _append(self, new: Sequence[Sequence[int]]) -> None:
        for read, tokens in zip(self._reads, new, strict=True):
            read.append(tokens)
        self._show_texts()

    def _show_texts(self) -> None:
        self._texts = [read.ids[start:] for read, start in zip(self._reads, self._starts, strict=True)]

    def _num_common(self, row: int) -> int:
        return min(super()._num_common(row), self._reads[row].num_fixed - 1 - self._starts[row])

    def _grow(self, state: DraftState, depth: int) -> DraftTree:
        if depth < 1:
            return DraftTree.root_only(state.root_ids)
        drafts = self._begin(state)
        rows, roots = self.cache.rows, state.root_ids.tolist()
        path = [[0] if row in rows else [] for row in range(len(self._reads))]
        for _ in range(1, depth):
            running = [draft for draft in drafts if not draft.is_over and len(draft.target_tokens) <= state.max_depth]
            values = torch.tensor([[draft.value] for draft in drafts], dtype=torch.float32, device="cpu")
            if not running or not state.should_continue(values):
                break
            last = [draft.tokens[-1] for draft in drafts]
            logits = self._logits(
                self.scorer(DraftTree.root_only(torch.tensor(last, dtype=torch.long, device="cpu")), self._positions)
            )
            self.cache.keep(path)
            self._note_cached({row: [token] for row, token in zip(rows, last, strict=True)})
            for slot, draft in enumerate(drafts):
                if draft in running:
                    draft.append(*self._choose(logits[slot, 0], state, slot, len(draft.target_tokens)))
        return DraftTree.from_rows(
            [
                draft.nodes(root, state.max_depth, self._num_target_tokens)
                for draft, root in zip(drafts, roots, strict=True)
            ]
        )

    def _begin(self, state: DraftState) -> list[Draft]:
        """Runs the committed tokens that the cache lacks; returns drafts of one token."""
        new = self._uncached()
        tree = DraftTree.from_rows([(tokens, range(-1, len(tokens) - 1)) for tokens in new.values()])
        logits = self._logits(self.scorer(tree, self._positions))
        drafts, kept = [], {}
        for slot, (row, tokens) in enumerate(new.items()):
            draft, num_kept = self._first(logits[slot, : len(tokens)], row, state, slot)
            drafts.append(draft)
            kept[row] = tokens[:num_kept]
        self.cache.keep([range(len(kept.get(row, ()))) for row in range(len(self._reads))])
        self._note_cached(kept)
        return drafts

    def _first(self, logits: Tensor, row: int, state: DraftState, slot: int) -> tuple[Draft, int]:
        """The most probable first token of a draft, and the number of committed tokens before it.

        It is the one after all of them, or a longer one in the place of the last ones.

        Args:
            logits: logits after each committed token that was run, [N, W].
        """
        read, vocabulary = self._reads[row], self._translation.draft
        tail = read.ids[read.num_fixed :]
        log_probs = logits[len(logits) - len(tail) - 1 :].float().log_softmax(-1)
        before, start, totals = 0.0, 0, []  # log-probability and bytes of the committed tokens
        best, at, token, written = -math.inf, 0, -1, 0
        for index, committed in enumerate(tail):
            for longer, score in self._longer(log_probs[index], read.tail, start):
                totals.append(before + score)
                if totals[-1] > best:
                    best, at, token, written = totals[-1], index, longer, len(read.tail) - start
            before += log_probs[index, committed].item()
            start += len(vocabulary.text(committed))
        whole = float(torch.tensor([before, *totals], dtype=torch.float64, device="cpu").logsumexp(0))
        if before + log_probs[-1].max().item() >= best or not math.isfinite(whole):
            draft = Draft(self._translation, read.tail, 0)
            token, value = self._choose(logits[-1], state, slot, 0)
            draft.append(token, value + min(before - whole, 0.0) if math.isfinite(whole) else value)
            return draft, len(logits)
        draft = Draft(self._translation, read.tail, written)
        draft.append(token, min(best - whole, 0.0))
        return draft, len(logits) - len(tail) + at

    def _longer(self, log_probs: Tensor, tail: bytes, start: int) -> list[tuple[int, float]]:
        """Probable tokens that begin like the committed text after `start` and are longer, with their
        log-probabilities, without those that the target would have written otherwise."""
        draft, written = self._translation.draft, len(tail) - start
        longer = self._sorted_ids[draft.longer(tail[start:])]
        scores, columns = log_probs[longer].topk(min(_MOST_LONGER, len(longer)))
        tokens = zip(longer[columns].tolist(), scores.tolist(), strict=True)
        return [
            (token, score) for token, score in tokens if self._translation.may_follow(tail, draft.text(token)[written:])
        ]

    def _choose(self, logits: Tensor, state: DraftState, slot: int, depth: int) -> tuple[int, float]:
        """The draft model's token for the logits [W] of a row, and its log-probability.

        In a request that samples, a token of the draft model gets the noise of the target's token with which its text
        begins.
        """
        scores = logits.float()
        if state.samples:
            if self._first_tokens is None:
                self._first_tokens = self._translation.first_tokens.to(logits.device)[: len(logits)]
            scores = state.select([slot]).child_scores(logits[None, None], depth, self._first_tokens)[0, 0]
            scores = scores.masked_fill(self._first_tokens < 0, -torch.inf)
        value, token = scores.max(0)
        return int(token), float(value - scores.logsumexp(0))
