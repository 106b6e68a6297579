"""The facts that drafters get before a round."""

from __future__ import annotations

import torch

from hf_speculate.drafting import DraftState
from hf_speculate.verification import Noise


def test_a_part_of_selected_rows_keeps_the_noise_of_its_rows():
    noise = Noise(3, 5, torch.device("cpu"))
    state = DraftState(
        root_ids=torch.tensor([7, 8, 9]),
        active=(True,) * 3,
        max_depth=2,
        chains_only=False,
        num_emitted=(1, 2, 3),
        _noise=noise,
    )
    part = state.select([1, 2]).select([1])
    assert part.root_ids.tolist() == [9]
    assert torch.equal(part.log_noise((0,)), state.log_noise((0,))[2:])
