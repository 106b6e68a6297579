"""Typical acceptance: lossy and says so, deterministic, and otherwise a request like any other."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from hf_speculate import DraftTree, Speculator
from hf_speculate.errors import UnsupportedRequestError
from hf_speculate.verification.typical import TypicalAcceptance
from hf_speculate_plugins.prompt_lookup import PromptLookupDrafter


SAMPLING = {"do_sample": True, "temperature": 1.5, "top_k": 0, "max_new_tokens": 32}


@pytest.fixture
def typical() -> Speculator:
    return Speculator(PromptLookupDrafter(), acceptance="typical", posterior_threshold=0.05, posterior_alpha=0.3)


class _PlainProcessor(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


def test_a_typical_speculator_says_that_it_is_lossy(typical, tiny_model, prompt):
    assert Speculator(PromptLookupDrafter()).lossless
    assert "lossy" not in repr(Speculator(PromptLookupDrafter()))
    assert not typical.lossless
    assert "TypicalAcceptance(posterior_threshold=0.05, posterior_alpha=0.3), lossy" in repr(typical)
    greedy = {"inputs": prompt(8), "max_new_tokens": 24}
    assert torch.equal(tiny_model().generate(**greedy, speculator=typical), tiny_model().generate(**greedy))
    assert typical.stats.lossy_calls == 0
    tiny_model().generate(prompt(8), **SAMPLING, speculator=typical)
    assert typical.stats.lossy_calls == 1
    assert typical.stats.to_dict()["lossy_calls"] == 1


def test_typical_acceptance_draws_nothing_and_does_not_depend_on_the_batch(typical, tiny_model, prompt):
    model = tiny_model()
    state = torch.get_rng_state()
    alone = [model.generate(prompt(n, seed=n), **SAMPLING, speculator=typical)[0, n:] for n in (6, 9)]
    assert torch.equal(torch.get_rng_state(), state)
    input_ids = torch.cat([torch.nn.functional.pad(prompt(n, seed=n), (9 - n, 0)) for n in (6, 9)])
    mask = torch.stack([torch.arange(9) >= 9 - n for n in (6, 9)]).long()
    batch = model.generate(input_ids, attention_mask=mask, **SAMPLING, speculator=typical)
    assert torch.equal(batch[:, 9:], torch.stack(alone))


def test_stopping_scores_and_row_wise_processors_work_as_ever(typical, tiny_model, prompt):
    model = tiny_model()
    output = model.generate(
        prompt(8),
        **SAMPLING,
        repetition_penalty=1.1,
        output_scores=True,
        return_dict_in_generate=True,
        speculator=typical,
    )
    new = output.sequences[0, 8:]
    assert len(output.scores) == len(new) == 32
    eos = int(new[9])
    stopped = model.generate(prompt(8), **SAMPLING, repetition_penalty=1.1, eos_token_id=eos, speculator=typical)
    assert stopped[0, 8:].tolist() == new[: new.tolist().index(eos) + 1].tolist()


def test_processors_that_may_keep_a_state_are_refused(typical, tiny_model, prompt):
    processors = LogitsProcessorList([_PlainProcessor()])
    with pytest.raises(UnsupportedRequestError, match=r"_PlainProcessor.*row_wise"):
        tiny_model().generate(prompt(8), **SAMPLING, logits_processor=processors, speculator=typical)
    processors[0].row_wise = True
    tiny_model().generate(prompt(8), **SAMPLING, logits_processor=processors, speculator=typical)


def test_the_deepest_then_likeliest_path_wins():
    tree = DraftTree(torch.tensor([[9, 1, 2, 3, 4]]), [-1, 0, 0, 1, 2])
    probs = torch.zeros(1, 5, 10)
    probs[0, :, 0] = 1.0
    for node, token, probability in ((0, 1, 0.3), (0, 2, 0.6), (1, 3, 0.6), (2, 4, 0.2)):
        probs[0, node, token] = probability
        probs[0, node, 0] -= probability
    rule = TypicalAcceptance(posterior_threshold=0.1, posterior_alpha=1.0)
    assert rule.last_nodes(probs.log(), tree).tolist() == [3]  # 0.18 along 1-3, 0.12 along 2-4
    strict = TypicalAcceptance(posterior_threshold=0.25, posterior_alpha=1.0)
    assert strict.last_nodes(probs.log(), tree).tolist() == [3]
    probs[0, 1, 3], probs[0, 1, 0] = 0.1, 0.9
    assert strict.last_nodes(probs.log(), tree).tolist() == [2]  # no path of two; the likelier child


def test_a_token_at_the_threshold_and_padding_nodes_are_not_accepted():
    tree = DraftTree.from_rows([([9, 1, 2], [-1, 0, 1]), ([9, 1], [-1, 0])])
    scores = torch.full((2, 3, 10), -torch.inf)
    scores[..., [1, 2, 7, 9]] = 0.0  # each of probability 0.25, also what the padding node of row 1 holds
    for epsilon, last in ((0.25, [0, 0]), (0.24, [2, 1])):
        rule = TypicalAcceptance(posterior_threshold=epsilon, posterior_alpha=1.0)
        assert rule.last_nodes(scores, tree).tolist() == last
