"""The shares of the best children of a node, in fewer kernels on a GPU."""

from __future__ import annotations

import pytest
import torch

from hf_speculate_plugins.trees import log_shares


@pytest.mark.gpu
def test_on_a_gpu_they_are_those_of_a_cpu():
    scores = torch.randn(2, 3, 4096, generator=torch.Generator().manual_seed(0))
    for found, expected in zip(log_shares(scores.cuda(), 5), log_shares(scores, 5), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
