"""Muon for the matrices of a head's layers, AdamW for everything else.

Muon (Jordan et al., 2024; `torch.optim.Muon`) orthogonalises the update of a matrix. It is not meant for embeddings,
output matrices, norms and biases. Rates are matched to AdamW's update size, so that one schedule serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hf_speculate.errors import SpeculateError


# Matrices with one row for each token: of embeddings, output layers and Markov heads.
_TOKEN_MATRICES = ("embed_tokens", "lm_head", "output_weight", "markov_w")


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers that step together: `lr` and `weight_decay` are Muon's, `betas` and `eps` AdamW's.

    AdamW has half of `lr` unless it is given its own. Embeddings, norms and biases do not decay.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        lr: float,
        *,
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        if not hasattr(torch.optim, "Muon"):
            raise SpeculateError(f"Muon is in torch >= 2.9, found {torch.__version__}. Possible: muon: false (AdamW).")
        trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        matrices = [parameter for name, parameter in trained if is_layer_matrix(name, parameter)]
        others = [parameter for name, parameter in trained if not is_layer_matrix(name, parameter)]
        rates = {"adjust_lr_fn": "match_rms_adamw", "weight_decay": weight_decay}
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, lr=lr, **rates))
        if others:
            rate = lr / 2 if adamw_lr is None else adamw_lr
            self._parts.append(torch.optim.AdamW(others, lr=rate, betas=betas, eps=eps, weight_decay=0.0))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share_groups()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self._parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()

    def _share_groups(self) -> None:
        """Shares the parts' own groups, whose rates schedules write."""
        self.param_groups = [group for part in self._parts for group in part.param_groups]


def is_layer_matrix(name: str, parameter: Tensor) -> bool:
    """True for parameters of Muon: matrices that do not have one row for each token."""
    return parameter.ndim == 2 and not any(part in name for part in _TOKEN_MATRICES)
