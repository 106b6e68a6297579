"""Sessions of one-pass heads that were told of a prompt, states of a round, and the nodes of their trees."""

from __future__ import annotations

import torch

from hf_speculate.drafting import DraftRequest, DraftState
from hf_speculate.tree import PADDING_PARENT


def state_for(roots, max_depth=99, **fields):
    return DraftState(
        root_ids=torch.tensor(roots),
        active=fields.pop("active", (True,) * len(roots)),
        max_depth=max_depth,
        chains_only=fields.pop("chains_only", False),
        num_emitted=(1,) * len(roots),
        **fields,
    )


def shown(drafter, model, inputs):
    """A session that was told of a prompt; roots are the last tokens."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    output = model(ids[:, :-1], attention_mask=None if mask is None else mask[:, :-1], output_hidden_states=True)
    padded = None if mask is None or bool(mask.all()) else mask[:, :-1].bool()
    session = drafter.start(DraftRequest(target=model, input_ids=ids[:, :-1], attention_mask=padded))
    features = {layer: output.hidden_states[layer] for layer in drafter.feature_layers}
    session.observe(ids[:, 1:], features, torch.full((len(ids),), ids.shape[1] - 1))
    return session


def nodes_of(tree, row=0):
    """(path, value) of the draft nodes of a row, in their order."""
    host, paths = tree.host, [()]
    for token, parent in list(zip(host.token_ids[row], host.parents[row], strict=True))[1:]:
        paths.append((*paths[parent], token) if parent != PADDING_PARENT else None)
    return [(path, value) for path, value in zip(paths, host.values[row], strict=True) if path]
