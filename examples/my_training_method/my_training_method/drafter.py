"""A head that reads the target's last hidden state and then only its own: the smallest recurrent drafter."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_speculate import Drafter, DraftRequest, DraftSession, DraftState, DraftTree
from hf_speculate.drafting import SavedHead
from hf_speculate.errors import CheckpointError, TargetMismatchError


CONFIG, WEIGHTS = "recurrent_head.json", "recurrent_head.safetensors"


class RecurrentHead(nn.Module):
    """A head that computes the state at a token from the state before and the token's embedding, [..., H] all three.

    The target's embeddings and output matrix do the rest, so a file holds two small matrices. A fresh head returns the
    state unchanged.
    """

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.up = nn.Linear(2 * hidden_size, width)
        self.down = nn.Linear(width, hidden_size)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, state: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        return state + self.down(nn.functional.silu(self.up(torch.cat([state, embedding], dim=-1))))


class RecurrentDrafter(Drafter):
    """Drafts a chain of `depth` tokens, one small step each."""

    name = "recurrent"

    def __init__(self, head: RecurrentHead, target, depth: int = 4):
        self.head = head.eval().requires_grad_(False)
        self.depth = depth
        self.base_model = target.config._name_or_path or None
        self.feature_layers = (target.config.get_text_config(decoder=True).num_hidden_layers,)

    @classmethod
    def for_target(cls, target, *, head: str, **options) -> RecurrentDrafter:
        return cls.from_folder(head, target, **options)

    @classmethod
    def recognizes(cls, folder: str) -> bool:
        return (Path(folder) / CONFIG).is_file()

    @classmethod
    def files(cls, folder: str) -> list[str]:
        return [CONFIG, WEIGHTS]

    @classmethod
    def from_folder(cls, folder: str, target, **options) -> RecurrentDrafter:
        return cls(load_head(folder, target).to(target.device, target.dtype), target, **options)

    def save_pretrained(self, path, layout=None) -> SavedHead:
        if layout not in (None, "recurrent"):
            raise CheckpointError(f"a recurrent head has the layout 'recurrent', not {layout!r}.")
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        sizes = {"hidden_size": self.head.down.out_features, "width": self.head.down.in_features}
        save_file(self.head.state_dict(), folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(sizes) + "\n")
        return SavedHead(algorithm="recurrent", layout="recurrent", base_model=self.base_model)

    def start(self, request: DraftRequest) -> RecurrentSession:
        return RecurrentSession(self, request)


class RecurrentSession(DraftSession):
    """One state a row: the target's, at the token before the root."""

    def __init__(self, drafter: RecurrentDrafter, request: DraftRequest):
        self.head, self.depth, self.layer = drafter.head, drafter.depth, drafter.feature_layers[0]
        self.embed, self.lm_head = request.target.get_input_embeddings(), request.target.get_output_embeddings()
        self.state = request.target.get_input_embeddings()(request.input_ids[:, -1].to(request.target.device))

    def observe(self, tokens, features, lengths) -> None:
        lengths = lengths.to(self.state.device)
        newest = features[self.layer][torch.arange(len(lengths)), (lengths - 1).clamp(min=0)]
        self.state = torch.where(lengths[:, None] > 0, newest, self.state)  # finished rows have nothing new

    def draft(self, state: DraftState) -> DraftTree:
        tokens, hidden = [state.root_ids.to(self.state.device)], self.state
        for depth in range(min(self.depth, state.max_depth)):
            hidden = self.head(hidden, self.embed(tokens[-1]))
            scores = state.child_scores(self.lm_head(hidden)[:, None], depth)
            tokens.append(scores[:, 0].argmax(-1))
        return DraftTree.chain(torch.stack(tokens, dim=1))


def load_head(folder: str, target) -> RecurrentHead:
    """The head in a folder, on the CPU; raises `TargetMismatchError` if it belongs to another target."""
    sizes = json.loads((Path(folder) / CONFIG).read_text())
    hidden_size = target.config.get_text_config(decoder=True).hidden_size
    if sizes["hidden_size"] != hidden_size:
        raise TargetMismatchError(f"the head is {sizes['hidden_size']} wide, the target's states {hidden_size}.")
    head = RecurrentHead(**sizes)
    head.load_state_dict(load_file(Path(folder) / WEIGHTS))
    return head
