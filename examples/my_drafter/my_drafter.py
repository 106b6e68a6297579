"""A drafter in fifty lines: after a token, draft what came after it before."""

from __future__ import annotations

from collections import defaultdict

from hf_speculate import Drafter, DraftRequest, DraftSession, DraftState, DraftTree


class BigramDrafter(Drafter):
    """Weights and options: shared by all requests, never modified while generating."""

    name = "bigram"

    def __init__(self, depth: int, branches: int):
        self.depth = depth
        self.branches = branches

    @classmethod
    def for_target(cls, target, *, depth: int = 4, branches: int = 2) -> BigramDrafter:
        return cls(depth, branches)

    def start(self, request: DraftRequest) -> BigramSession:
        return BigramSession(self, request)


class BigramSession(DraftSession):
    """What one request has taught: the followers of every token, latest first."""

    def __init__(self, drafter: BigramDrafter, request: DraftRequest):
        self.drafter = drafter
        self.followers: dict[int | None, list[int]] = defaultdict(list)
        self.last: list[int | None] = [None] * len(request.input_ids)

    def observe(self, tokens, features, lengths) -> None:
        for row, (new, length) in enumerate(zip(tokens.tolist(), lengths.tolist(), strict=True)):
            for token in new[:length]:
                followers = self.followers[self.last[row]]
                if token in followers:
                    followers.remove(token)
                followers.insert(0, token)
                self.last[row] = token

    def draft(self, state: DraftState) -> DraftTree:
        return DraftTree.from_rows([self._row(root, state) for root in state.root_ids.tolist()])

    def _row(self, root: int, state: DraftState) -> tuple[list[int], list[int]]:
        tokens, parents, level = [root], [-1], [0]
        for depth in range(min(self.drafter.depth, state.max_depth)):
            count = self.drafter.branches if depth == 0 and not state.chains_only else 1
            children = [(node, token) for node in level for token in self.followers[tokens[node]][:count]]
            level = list(range(len(tokens), len(tokens) + len(children)))
            parents += [node for node, _ in children]
            tokens += [token for _, token in children]
        return tokens, parents
