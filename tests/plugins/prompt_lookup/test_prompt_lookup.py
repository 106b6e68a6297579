"""Prompt lookup: the longest suffix wins, nothing is rescanned, continuations become branches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_speculate.drafting import DraftChecks
from hf_speculate_plugins.prompt_lookup import PromptLookupDrafter, PromptLookupOptions, SuffixIndex

from ...support import text_drafters


deterministic = settings(derandomize=True, deadline=None, max_examples=150, database=None)


def start(*texts, **options):
    return text_drafters.start(PromptLookupDrafter(PromptLookupOptions(**options)), *texts)


def draft(session, *texts, **options):
    state = text_drafters.state(*texts, **options)
    return DraftChecks("prompt_lookup", vocab_size=100).admit(session.draft(state), state.root_ids.tolist())


def branches(tree, row=0):
    """Token sequences from the root's children to the leaves."""
    tokens, parents = tree.host.token_ids[row], tree.host.parents[row]
    paths = {0: ()}
    for node in range(1, len(tokens)):
        if parents[node] >= 0:
            paths[node] = (*paths[parents[node]], tokens[node])
    return [path for node, path in paths.items() if node and node not in parents]


def rescan(tokens, min_ngram, max_ngram, count):
    """What `SuffixIndex.continuations` means, by scanning the whole text."""
    starts = []
    for size in range(min(max_ngram, len(tokens)), min_ngram - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            is_new = all(tokens[end] != tokens[start] for start in starts)
            if len(starts) < count and is_new and tokens[end - size : end] == tokens[-size:]:
                starts.append(end)
    return starts


class TestIndex:
    @deterministic
    @given(
        st.lists(st.lists(st.integers(0, 2), max_size=8), min_size=1, max_size=4),
        st.integers(1, 3),
        st.integers(0, 3),
        st.integers(1, 3),
    )
    def test_growing_in_pieces_equals_a_rescan_of_the_whole_text(self, pieces, min_ngram, more, count):
        index, text = SuffixIndex(min_ngram, min_ngram + more), []
        for piece in pieces:
            index.extend(piece)
            text += piece
            assert [start for _, start in index.continuations(count)] == rescan(
                text, min_ngram, min_ngram + more, count
            )

    def test_a_common_ngram_costs_no_scan_of_the_whole_text(self):
        index = SuffixIndex(1, 1)
        index.extend([5, 6] * 3 + [5, 5] * 500)
        # 6 came after 5, but a thousand occurrences ago.
        assert [index.tokens[start] for _, start in index.continuations(4)] == [5]


class TestDraft:
    def test_the_longest_suffix_wins_over_a_later_shorter_one(self):
        text = [1, 2, 3, 40, 9, 9, 2, 3, 50, 9, 1, 2, 3]  # after "2 3" 50 is later, after "1 2 3" only 40
        assert branches(draft(start(text, depth=1), text, chains_only=True)) == [(40,)]
        assert branches(draft(start(text, depth=1), text)) == [(40,), (50,)]

    def test_of_equal_suffixes_the_later_occurrence_wins(self):
        text = [1, 2, 40, 1, 2, 50, 1, 2]
        assert branches(draft(start(text, depth=1), text, chains_only=True)) == [(50,)]

    def test_continuations_become_siblings_below_the_root(self):
        text = [1, 2, 40, 41, 1, 2, 50, 51, 1, 2]
        tree = draft(start(text, depth=2), text)
        assert branches(tree) == [(50, 51), (40, 41)]
        assert sum(parent == 0 for parent in tree.host.parents[0]) == 2

    def test_without_a_match_only_the_root_is_drafted(self):
        text = [1, 2, 3, 4]
        assert draft(start(text), text).num_nodes == 1

    def test_min_ngram_keeps_short_matches_out(self):
        text = [1, 2, 40, 9, 2]
        assert draft(start(text, min_ngram=2), text).num_nodes == 1
        assert branches(draft(start(text, min_ngram=1, depth=1), text)) == [(40,)]

    @pytest.mark.parametrize("max_depth", [1, 2, 3, 50])
    @pytest.mark.parametrize("options", [{"depth": 4}, {"depth": 6, "max_nodes": 5}])
    def test_every_budget_is_kept(self, max_depth, options):
        text = [1, 2, *range(40, 50), 1, 2, *range(60, 70), 1, 2, *range(80, 90), 1, 2]
        tree = draft(start(text, **options), text, max_depth=max_depth)
        assert tree.host.depth(0) == min(max_depth, options["depth"], options.get("max_nodes", 99))
        assert 0 < tree.host.num_drafted(0) <= options.get("max_nodes", 12)

    def test_a_target_that_takes_chains_gets_the_best_branch_alone(self):
        text = [1, 2, 40, 41, 1, 2, 50, 51, 1, 2]
        assert branches(draft(start(text, depth=2), text, chains_only=True)) == [(50, 51)]

    def test_output_is_searched_as_well_as_the_prompt(self):
        text = [7, 1, 2, 3]
        session = start(text)
        session.observe(torch.tensor([[9, 7, 1, 0]]), {}, torch.tensor([3]))  # the last column is padding
        assert branches(draft(session, [1], max_depth=3)) == [(2, 3, 9)]

    def test_padding_is_not_text(self):
        short, long = [5, 0, 6, 5, 0], [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
        alone = branches(draft(start(short), short))
        tree = draft(start(short, long), short, long)
        assert branches(tree, row=0) == alone == [(6, 5, 0)]
        text = [7, 0, 0]  # its last two tokens look like padding
        assert draft(start(text, long, min_ngram=2), text, long).host.num_drafted(0) == 0

    def test_rows_that_are_finished_are_left_alone(self):
        text = [1, 2, 40, 1, 2]
        tree = draft(start(text, text), text, text, active=(True, False))
        assert [tree.host.num_drafted(row) for row in range(2)] == [3, 0]

    def test_a_prompt_of_one_token_and_an_empty_prompt_are_fine(self):
        for text in ([5, 6], [6]):
            assert draft(start(text), text).num_nodes == 1


class TestOptions:
    def test_the_shortest_ngram_cannot_be_above_the_longest(self):
        with pytest.raises(ValueError, match=r"min_ngram \(4\) is above max_ngram \(3\)"):
            PromptLookupOptions(min_ngram=4, max_ngram=3)
