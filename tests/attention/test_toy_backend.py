"""A new attention over trees: one class that gets `AttentionMetadata`, and a forward that hands it over.

The toy is plain softmax attention. It gets no mask: the metadata says what each node sees. `attending` makes it the
attention of a forward, and "sdpa" of transformers calls it in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from hf_speculate import Speculator
from hf_speculate.attention import AttentionMetadata
from hf_speculate.attention.in_progress import StockAttention, attending
from hf_speculate.forward import EagerRunner, Nodes, Scorer
from hf_speculate.testing import ScriptedDrafter

from ..support.inputs import padded_batch
from ..support.models import VOCAB_SIZE
from ..support.requests import prefilled


@dataclass
class SoftmaxAttention:
    """The whole backend: softmax over the entries that a node sees.

    Attributes:
        metadata: metadata of the forward.
        num_calls: number of layers that were computed.
    """

    metadata: AttentionMetadata
    num_calls: int = field(default=0, init=False)

    def attend(
        self, stock: StockAttention, module: Any, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        self.num_calls += 1
        key, value = (part.repeat_interleave(module.num_key_value_groups, dim=1) for part in (key, value))
        scores = kwargs["scaling"] * query @ key.mT
        weights = scores.masked_fill(~self._visible()[:, None], -torch.inf).softmax(-1)
        return (weights @ value).transpose(1, 2), None

    def _visible(self) -> Tensor:
        """bool [R, n, S]: the entries of the text, then the nodes among themselves."""
        metadata, rows = self.metadata, len(self.metadata.lengths)
        nodes = metadata.plan.ancestors[:, metadata.num_cached :].expand(rows, -1, -1)
        prefix = metadata.visible_prefix
        if prefix is None:
            prefix = torch.ones(rows, metadata.num_prefix, dtype=torch.bool, device=metadata.device)
        return torch.cat([prefix[:, None].expand(-1, nodes.shape[1], -1), nodes], dim=2)


class ToyRunner(EagerRunner):
    """The forward of the model with the toy: the file of a new backend, with `SoftmaxAttention`."""

    used: ClassVar[list[SoftmaxAttention]] = []

    def run(self, scorer: Scorer, nodes: Nodes) -> Any:
        self.used.append(SoftmaxAttention(scorer.metadata(nodes)))
        with attending(self.used[-1], scorer.device) as mask:
            return scorer.run_model(nodes, self.used[-1].metadata, mask)


@pytest.fixture
def toys(monkeypatch):
    """Uses the toy in plain forwards over trees; gives the backends of all forwards."""
    ToyRunner.used.clear()
    monkeypatch.setattr("hf_speculate.forward.scorer.EagerRunner", ToyRunner)  # the line of a new backend
    return ToyRunner.used


TEXTS = [[3, 1, 4, 1, 5, 9], [9, 2], [6, 5, 3]]


@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS], ids=["1 row", "3 rows left padded"])
def test_toy_attention_gives_trees_the_logits_of_grouped_sdpa(tiny_model, random_tree, texts, request):
    model, tree = tiny_model("qwen2", dtype=torch.float64), random_tree(3, len(texts), VOCAB_SIZE)
    scorer, positions = prefilled(model, texts)
    expected = scorer(tree, positions).logits
    toys = request.getfixturevalue("toys")
    scorer, positions = prefilled(model, texts)
    torch.testing.assert_close(scorer(tree, positions).logits, expected, rtol=1e-10, atol=1e-12)
    assert [toy.num_calls for toy in toys] == [model.config.num_hidden_layers]


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("lengths", [(9,), (11, 4, 9)], ids=["1 row", "3 rows left padded"])
def test_toy_attention_gives_the_text_of_plain_generate(tiny_model, prompt, toys, lengths, do_sample):
    model, batch = tiny_model("llama", dtype=torch.float64), padded_batch(prompt, lengths)
    request = {**batch, "max_new_tokens": 24, "do_sample": do_sample, "pad_token_id": 0}
    torch.manual_seed(5)
    plain = model.generate(**request)
    assert not toys, "plain generate has its own attention"
    drafter = ScriptedDrafter(plain[:, max(lengths) :], (2, 2, 1), accuracy=0.7, vocab_size=VOCAB_SIZE)
    speculator = Speculator(drafter, adaptive=False)
    torch.manual_seed(5)
    assert torch.equal(model.generate(**request, speculator=speculator), plain)
    assert speculator.stats.accepted_tokens > 5
    assert len(toys) == speculator.stats.target_forwards
    assert {toy.num_calls for toy in toys} == {model.config.num_hidden_layers}
