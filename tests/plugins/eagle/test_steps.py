"""Draft logits of EAGLE heads are those of a forward from scratch, at every node of every round."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_speculate import Speculator
from hf_speculate.cache import as_cache, cache_of
from hf_speculate.drafting import RAW_LAST
from hf_speculate_plugins.eagle import EagleDrafter, EagleSession
from hf_speculate_plugins.eagle.steps import PlainSteps
from hf_speculate_plugins.heads import CachedAttention, HeadCache

from ...support.heads import EAGLE_LAYOUTS, PLAIN, SHAPES, batch_of, target
from ...support.tiers import quick_quarter


def from_scratch(module, states, tokens, first_position: int, path, memo: dict):
    """Logits after `path` and the state fed back: the row run anew, without a cache, for every token of the path."""
    if path not in memo:
        if path:
            _, state = from_scratch(module, states, tokens, first_position, path[:-1], memo)
            previous = memo[path[:-1]][2]
            if module.spec.parallel:
                state = module.masks(1, 1)[1][0, 0]
            states, tokens = torch.cat([previous[0], state[None]]), torch.cat([previous[1], torch.tensor(path[-1:])])
        count = len(tokens)
        distance = torch.arange(count)[:, None] - torch.arange(count)
        masks = []
        for window in module.spec.windows:
            hidden_pairs = (distance < 0) | (distance >= (window or count))
            masks.append(torch.zeros(1, 1, count, count, dtype=states.dtype).masked_fill(hidden_pairs, -torch.inf))
        positions = first_position + torch.arange(count)[None]
        hidden = module(tokens[None], states[None], positions, CachedAttention(DynamicCache(), masks))
        logits, fed_back = module.read(hidden[0, -1])
        memo[path] = (logits, fed_back, (states, tokens))
    return memo[path][:2]


class Watch:
    """Compares every draft logit of the sessions of one drafter with `from_scratch`."""

    def __init__(self, monkeypatch, drafter, mask=None, first_position: int = 0):
        self.head, self.first_position = drafter.head, first_position
        self.mask = None if mask is None else mask.bool()
        self.worst, self.num_nodes, self.num_rounds, self.accepted = 0.0, 0, 0, 0
        self.rows, self.forest, self.active, self.memo = [], None, (), {}
        observe, draft, level, drop = EagleSession.observe, EagleSession.draft, PlainSteps.level, HeadCache.drop
        monkeypatch.setattr(EagleSession, "observe", lambda s, *args: self.observe(observe, s, *args))
        monkeypatch.setattr(EagleSession, "draft", lambda s, state: self.draft(draft, s, state))
        monkeypatch.setattr(PlainSteps, "level", lambda s, *args: self.level(level, s, *args))
        monkeypatch.setattr(HeadCache, "drop", lambda r: self.drop(drop, r))

    def observe(self, original, session, tokens, features, lengths):
        original(session, tokens, features, lengths)
        states = self.head.fuse([features[layer] for layer in session._layers])
        for row, length in enumerate(lengths.tolist()):
            real = torch.arange(tokens.shape[1]) < length
            if not self.memo and len(self.rows) < len(lengths):
                real = real if self.mask is None else self.mask[row, -tokens.shape[1] :]
                self.rows.append((states[row, real], tokens[row, real]))
                continue
            self.accepted += max(length - 1, 0)
            old = self.rows[row]
            self.rows[row] = (torch.cat([old[0], states[row, real]]), torch.cat([old[1], tokens[row, real]]))

    def draft(self, original, session, state):
        self.active, self.memo = state.active, {row: {} for row in range(len(self.rows))}
        self.num_rounds += 1
        session._read_pending()
        self.compare(self.head.read(session._root_hidden[:, None])[0], [[()]] * len(self.rows))
        for row, (_, tokens) in enumerate(self.rows):
            if state.active[row]:
                assert tokens[-1] == state.root_ids[row]
        return original(session, state)

    def level(self, original, steps, token_ids, states, plan):
        logits, fed_back = original(steps, token_ids, states, plan)
        self.forest = token_ids if self.forest is None else torch.cat([self.forest, token_ids], dim=1)
        ancestors = plan.ancestors.expand(len(self.rows), -1, -1)
        paths = [
            [tuple(self.forest[row, ancestors[row, node]].tolist()) for node in range(*self.new(plan, token_ids))]
            for row in range(len(self.rows))
        ]
        self.compare(logits, paths)
        return logits, fed_back

    def new(self, plan, token_ids):
        return plan.num_nodes - token_ids.shape[1], plan.num_nodes

    def drop(self, original, head_cache):
        self.forest = None
        original(head_cache)

    def compare(self, logits, paths):
        for row, row_paths in enumerate(paths):
            for node, path in enumerate(row_paths):
                if self.active[row]:
                    expected, _ = from_scratch(self.head, *self.rows[row], self.first_position, path, self.memo[row])
                    self.worst = max(self.worst, float((logits[row, node] - expected).abs().max()))
                    self.num_nodes += 1


@pytest.mark.usefixtures("unchecked_shapes")
class TestDraftLogitsFromScratch:
    """fp64: at every round, every node's draft logits are those of an uncached forward over its own path."""

    @pytest.mark.parametrize("layout", quick_quarter(EAGLE_LAYOUTS))
    @pytest.mark.parametrize(("shape", "size"), [("dynamic", 3), ("chain", 1)])
    def test_draft_logits_equal_a_fresh_forward_at_every_node(self, head, prompt, monkeypatch, layout, size, shape):
        model, batch = target(dtype=torch.float64), batch_of(prompt, size)
        options = {**SHAPES[shape], **({"top_k": 12, "max_nodes": 60} if shape == "dynamic" else {})}
        drafter = EagleDrafter.from_folder(head(layout), model, **options)
        watch = Watch(monkeypatch, drafter, batch["attention_mask"])
        model.generate(**batch, **PLAIN, do_sample=True, speculator=Speculator(drafter))
        assert watch.worst < 1e-6
        assert watch.num_rounds > 5
        assert watch.num_nodes > 2 * watch.num_rounds
        if shape == "dynamic":
            assert watch.accepted > 0

    def test_draft_logits_equal_a_fresh_forward_in_a_second_turn(self, head, prompt, monkeypatch):
        model = target(dtype=torch.float64)
        drafter = EagleDrafter.from_folder(head("speculators"), model, **SHAPES["dynamic"])
        first = model.generate(
            prompt(9), **PLAIN, do_sample=False, speculator=Speculator(drafter), return_dict_in_generate=True
        )
        text = torch.cat([first.sequences, prompt(6, seed=4)], dim=1)
        known_from = cache_of(first).get_seq_length()
        cold = EagleDrafter.from_folder(head("speculators"), model, **SHAPES["dynamic"])  # knows nothing of turn one
        watch = Watch(monkeypatch, cold, first_position=known_from)
        plain = model.generate(text, **PLAIN, do_sample=False)
        second = model.generate(
            text, **PLAIN, do_sample=False, speculator=Speculator(cold), **as_cache(cache_of(first))
        )
        assert torch.equal(plain, second)
        last_round = drafter.options.depth + 1  # nothing was drafted after it, so it was not told
        assert len(watch.rows[0][1]) >= text.shape[1] - known_from + PLAIN["max_new_tokens"] - 1 - last_round
        assert watch.num_rounds > 3
        assert watch.worst < 1e-6

    @pytest.mark.parametrize("layout", ["safeailab", "speculators"])
    def test_long_prompts_are_read_in_parts(self, head, prompt, monkeypatch, layout):
        monkeypatch.setattr("hf_speculate_plugins.eagle.steps._CHUNK", 5)
        model, batch = target(dtype=torch.float64), batch_of(prompt, 3)
        drafter = EagleDrafter.from_folder(head(layout), model, depth=2, top_k=2)
        watch = Watch(monkeypatch, drafter, batch["attention_mask"])
        model.generate(**batch, **PLAIN, do_sample=False, speculator=Speculator(drafter))
        assert watch.num_rounds > 5
        assert watch.worst < 1e-6

    def test_features_are_the_targets_states_on_the_text(self, head, prompt, monkeypatch):
        model = target(dtype=torch.float64)
        drafter = EagleDrafter.from_folder(head("specforge"), model, depth=3, top_k=12, max_nodes=60)
        assert drafter.entry_layers == (1, 4, RAW_LAST)
        watch = Watch(monkeypatch, drafter)
        text = model.generate(prompt(9), **PLAIN, do_sample=True, speculator=Speculator(drafter))
        raw = []
        hook = model.model.layers[-1].register_forward_hook(lambda *args: raw.append(args[-1]))
        output = model(text, output_hidden_states=True)
        hook.remove()
        torch.testing.assert_close(model.model.norm(raw[0]), output.hidden_states[-1])
        expected = drafter.head.fuse([output.hidden_states[1], output.hidden_states[4], raw[0]])
        states, tokens = watch.rows[0]
        assert torch.equal(tokens, text[0, 1 : len(tokens) + 1])
        torch.testing.assert_close(states, expected[0, : len(states)], atol=1e-5, rtol=1e-5)
        hooks = model.model.layers[-1]._forward_hooks.values()
        assert not any(hook.__module__.startswith("hf_speculate") for hook in hooks)

    @pytest.mark.parametrize("depth", [1, 4])
    def test_a_round_costs_one_forward_of_the_head_per_level(self, head, prompt, monkeypatch, depth):
        drafter = EagleDrafter.from_folder(head(), target(), depth=depth, top_k=4)
        calls, forward = [], drafter.head.forward
        monkeypatch.setattr(
            drafter.head, "forward", lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs)
        )
        speculator = Speculator(drafter)
        target().generate(prompt(9), **{**PLAIN, "max_new_tokens": 60}, do_sample=False, speculator=speculator)
        # One for the prompt, which expands the first tree's root; less where the budget ends.
        assert depth * (speculator.stats.rounds - 4) < len(calls) <= depth * speculator.stats.rounds + 1
