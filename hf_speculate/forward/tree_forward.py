"""One forward over a tree as a function of tensors with fixed shapes and addresses, so that it can be captured.

Everything that changes from round to round comes in as tensors: where rows end, the tokens and parents of the nodes,
how many of them there are. Positions, mask and slots are made inside. If the request's sampler can choose all tokens at
once (`BatchedChoice`), the function also finds the accepted path of every row, moves its KV entries to the end of the
row's text, and gathers the hidden states along it. The host then reads one table (`ScoredTable`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..attention import CapturedMetadata, MaskForm
from ..cache import as_cache
from ..graphs import Stacks, static_cache
from ..tree import PADDING_PARENT, ROOT_PARENT, TreePlan
from ..verification import BatchedChoice


# Columns of the plan: entries of a row's text, position id of its root, number of nodes; then tokens and parents.
LENGTH, POSITION, COUNT, NODES = range(4)


@dataclass(frozen=True)
class AcceptedPath:
    """The accepted path of every row, found on the device.

    Attributes:
        nodes: int64 [B, W], path nodes, root first; 0 from `counts` on.
        counts: int64 [B], length of the path, the root included.
    """

    nodes: Int[Tensor, "B W"]
    counts: Int[Tensor, " B"]

    @classmethod
    def of(
        cls, tokens: Int[Tensor, "B W"], parents: Int[Tensor, "B W"], plan: TreePlan, chosen: Tensor
    ) -> AcceptedPath:
        """The path that `chosen` [B, W], the token after each node, leads down."""
        fits = (tokens == chosen.gather(1, parents.clamp(min=0))) & (parents >= 0)
        fits |= parents == ROOT_PARENT
        is_accepted = (fits[:, None] | ~plan.ancestors).all(-1) & (parents != PADDING_PARENT)
        # A node goes to the column of its depth; those that are not accepted go to one more column, which is dropped.
        width = tokens.shape[1]
        columns = plan.depths.masked_fill(~is_accepted, width)
        places = torch.arange(width, device=tokens.device, dtype=torch.long).expand_as(columns)
        nodes = torch.zeros_like(tokens[:, :1]).repeat(1, width + 1).scatter(1, columns, places)
        return cls(nodes[:, :width], is_accepted.sum(-1))

    def states(self, states: Float[Tensor, "B W H"]) -> Float[Tensor, "B W H"]:
        """Hidden states along the path."""
        return states.gather(1, self.nodes[..., None].expand(-1, -1, states.shape[-1]))

    def move(self, stacks: Stacks, first: Tensor, lengths: Int[Tensor, " B"]) -> None:
        """Moves the path's entries from slot `first` on to the end of each row's text, in all layers."""
        steps = torch.arange(self.nodes.shape[1], device=lengths.device, dtype=torch.long)
        destinations = lengths[:, None] + steps
        sources = torch.where(steps < self.counts[:, None], first + self.nodes, destinations)
        rows = torch.arange(len(lengths), device=lengths.device, dtype=torch.long)[:, None]
        for stack in stacks:
            stack[:, rows, :, destinations] = stack[:, rows, :, sources]


@dataclass(frozen=True)
class GraphNodes:
    """The nodes of a tree as tensors of static shape, read from a plan [B, NODES + 2 W].

    Attributes:
        lengths: int64 [B], entries of each row's text.
        raw: tokens and parents as they came in.
        tokens, parents: the same with values that no kernel can fail on; nodes beyond the row's number are padding.
        tree: depths and ancestors.
        positions: int64 [B, W], position ids.
        slots: int64 [W], where the nodes' entries are written.
    """

    lengths: Tensor
    raw: tuple[Tensor, Tensor]
    tokens: Tensor
    parents: Tensor
    tree: TreePlan
    positions: Tensor
    slots: Tensor

    @classmethod
    def of(cls, plan: Int[Tensor, "B K"], vocab_size: int) -> GraphNodes:
        width = (plan.shape[1] - NODES) // 2
        numbers = torch.arange(width, device=plan.device, dtype=torch.long)
        raw_tokens, raw_parents = plan[:, NODES : NODES + width], plan[:, NODES + width :]
        is_padding = numbers >= plan[:, COUNT, None]
        # Padding runs the root again, so what it writes is finite if that is.
        tokens = torch.where(is_padding, raw_tokens[:, :1], raw_tokens).clamp(0, vocab_size - 1)
        parents = torch.minimum(raw_parents.clamp(min=PADDING_PARENT), numbers - 1)
        parents = parents.masked_fill(is_padding, PADDING_PARENT)
        tree = TreePlan.from_tensor(parents, max_depth=width - 1)
        lengths = plan[:, LENGTH]
        positions, slots = plan[:, POSITION, None] + tree.depths, lengths.max() + numbers
        return cls(lengths, (raw_tokens, raw_parents), tokens, parents, tree, positions, slots)

    def attention(self, inputs: Mapping[str, Tensor]) -> CapturedMetadata:
        """The attention metadata of a forward over all nodes."""
        return CapturedMetadata(inputs["prompt"], self.lengths, self.slots, self.tree.ancestors, inputs.get("starts"))


def tree_forward(
    model: Any,
    last_layer: nn.Module | None,
    stacks: Stacks,
    inputs: Mapping[str, Tensor],
    options: Mapping[str, Any],
    choice: BatchedChoice | None,
    vocab_size: int,
    attention: tuple[MaskForm, int, torch.dtype],
) -> dict[str, Any]:
    """Scores a tree; see the module.

    Args:
        last_layer: layer whose output is wanted before the final norm; None if it is not.
        inputs: `plan` [B, NODES + 2 W] and `prompt` [B, M] (`GraphNodes`); `starts` [B], the number of padding entries
            of each row, for the kernel; with a choice `values` [B, W] of the nodes, and its own inputs.
        options: further arguments of the forward.
        choice: choice of the tokens; None leaves it to the host.
        vocab_size: number of token ids that the model has embeddings for.
        attention: form of masks, query heads for each KV head, and dtype of masks.

    Returns:
        `logits` [B, W, V]; `hidden_states`, None or one for each layer; `last`, the output of `last_layer`. With a
        choice also `words` (`ScoredTable`), and `along`: the states along the accepted path, by layer.
    """
    nodes = GraphNodes.of(inputs["plan"], vocab_size)
    cache = static_cache(stacks, nodes.slots)
    with _output_of(last_layer) as last, nodes.attention(inputs).masking(*attention) as mask:
        output = model(
            input_ids=nodes.tokens,
            position_ids=nodes.positions,
            attention_mask=mask,
            **as_cache(cache),
            use_cache=True,
            return_dict=True,
            **options,
        )
    result = {"logits": output.logits, "hidden_states": output.hidden_states, "last": last[0] if last else None}
    if choice is not None:
        chosen, are_tainted = choice(output.logits, nodes.tokens, nodes.tree, inputs)
        along = AcceptedPath.of(nodes.tokens, nodes.parents, nodes.tree, chosen)
        along.move(stacks, nodes.slots[0], nodes.lengths)
        bits = inputs["values"].view(torch.int32).long()
        result["words"] = torch.cat([chosen, are_tainted[:, None].long(), *nodes.raw, bits], dim=1)
        states = dict(enumerate(output.hidden_states or ()))
        wanted = {layer: each for layer, each in states.items() if each is not None}
        if last:
            wanted["last"] = last[0]  # type: ignore[index]
        result["along"] = {layer: along.states(each) for layer, each in wanted.items()}
    return result


class _output_of:
    """A context that lists the outputs of a module."""

    def __init__(self, module: nn.Module | None):
        self._module, self._outputs = module, []

    def __enter__(self) -> list[Tensor]:
        if self._module is not None:
            self._thread = threading.get_ident()
            self._hook = self._module.register_forward_hook(self._keep)
        return self._outputs

    def __exit__(self, *_exception: Any) -> None:
        if self._module is not None:
            self._hook.remove()

    def _keep(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:  # other threads may run the same model
            self._outputs.append(output[0] if isinstance(output, tuple) else output)
