"""Muon and AdamW as one optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hf_speculate_training.run.optimizers import MuonWithAdamW


if not hasattr(torch.optim, "Muon"):
    pytest.skip("torch.optim.Muon is new in torch 2.9", allow_module_level=True)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.layer, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, ids):
        return self.lm_head(self.norm(self.layer(self.embed_tokens(ids)))).logsumexp(-1).sum()


def make(**options):
    torch.manual_seed(0)
    head = Head()
    return head, MuonWithAdamW(head.named_parameters(), lr=1e-2, **options)


def run(head, optimizer, steps):
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for _ in range(steps):
        optimizer.zero_grad()
        head(torch.arange(7)).backward()
        optimizer.step()
        scheduler.step()


def test_each_parameter_gets_the_update_of_its_own_optimizer():
    head, optimizer = make(weight_decay=0.1)
    reference = copy.deepcopy(head)
    others = [p for name, p in reference.named_parameters() if name != "layer.weight"]
    muon = torch.optim.Muon([reference.layer.weight], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0)
    run(head, optimizer, 1)
    reference(torch.arange(7)).backward()
    muon.step()
    adamw.step()
    for mine, its in zip(head.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0)


def test_a_schedule_reaches_both():
    head, optimizer = make()
    run(head, optimizer, 3)
    assert [group["lr"] for group in optimizer._parts[0].param_groups] == [pytest.approx(1e-2 / 4)]
    assert [group["lr"] for group in optimizer._parts[1].param_groups] == [pytest.approx(5e-3 / 4)]
