"""Files of heads of decoder layers: opened, loaded, written and converted, with an account of every key.

A method derives from `HeadFiles` and defines what its files mean: how a config becomes a spec, and a spec tensors and a
config. A layout that cannot express a head is refused: readers would take the file for another head, draft badly and
never fail.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from hf_speculate.drafting import SavedHead
from hf_speculate.errors import CheckpointError, TargetMismatchError
from hf_speculate.files import listed
from hf_speculate.messages import get_logger
from hf_speculate.target import GenerativeModel, embedding_layer, embedding_rows, last_device, output_layer, output_rows

from ..checkpoints import (
    Checkpoint,
    ConfigValues,
    HeadFacts,
    HeadSpec,
    KeyAccount,
    LoadReport,
    OpenedHead,
    Shapes,
    TargetFiles,
    check_stated_target,
    draft_vocabulary,
    facts_of_target,
    is_copy,
    read_checkpoint,
    shared_embeddings,
    shared_output,
    stated_name,
    target_needed,
    were_trained,
    write_checkpoint,
)
from ..origin import check_head_vocabulary
from .head import Head, LoadedHead, built_head, dense_state, keep_packed


logger = get_logger(__name__)

Spec = TypeVar("Spec", bound=HeadSpec)

Limit = tuple[str, Callable[[Any], bool]]
"""One feature that a layout cannot express: its name for people, and whether a spec needs it."""

Written = tuple[str, dict[str, Tensor], dict[str, Any]]
"""Name of the weight file, tensors and config of a head in some layout."""

_EMBEDDINGS, _OUTPUT = "embed_tokens.weight", "lm_head.weight"


class HeadFiles(Generic[Spec, Head]):
    """The files of one method's heads.

    Class attributes:
        name: name of the method, for messages.
        kind: kind of head, for messages: "EAGLE head".
        head_class: module that computes the heads.
        conventions_class: options that override how a head is read.
        section: object of the config that the method keeps its own keys in.
        layer_type: model type whose class reads the decoder layers of flat configs.
        config_says: facts that only the config has, for messages.
        follows: switches of `NEUTRAL` that such heads follow.
        readers: layout by the name of a program that reads it.
        limits: limits of every layout that can be written.
    """

    name: ClassVar[str]
    kind: ClassVar[str]
    head_class: ClassVar[type[Any]]
    conventions_class: ClassVar[type[Any]]
    section: ClassVar[str]
    layer_type: ClassVar[str]
    config_says: ClassVar[str]
    follows: ClassVar[Collection[str]] = ()
    readers: ClassVar[Mapping[str, str]]
    limits: ClassVar[Mapping[str, tuple[Limit, ...]]]

    # The parts that a method brings.

    @classmethod
    def recognizes(cls, shapes: Shapes) -> bool:
        """Whether tensors of these names and shapes are a head of this method."""
        raise NotImplementedError

    @classmethod
    def spec_of(cls, stated: HeadFacts, conventions: Any) -> Spec:
        """The spec of a head; a `KeyError` names a tensor that is missing."""
        raise NotImplementedError

    @classmethod
    def unclear(cls, stated: HeadFacts, spec: Spec) -> dict[str, str]:
        """Questions that the files leave open, by the option of the conventions that answers each."""
        raise NotImplementedError

    @classmethod
    def written(cls, head: Head, target_ids: Tensor | None, layout: str, of_target: Mapping[str, Any]) -> Written:
        """The head as files of `layout`; arguments as of `write`."""
        raise NotImplementedError

    @classmethod
    def stores(cls, layout: str, spec: Spec) -> dict[str, bool]:
        """Whether files of `layout` hold `embed_tokens` and `lm_head` even where these are the target's."""
        raise NotImplementedError

    @classmethod
    def layout_of(cls, spec: Spec) -> str:
        """The layout of the files that a head was read from."""
        return spec.dialect

    @classmethod
    def default_layout(cls, spec: Spec) -> str:
        """The layout that a head is written in by default."""
        raise NotImplementedError

    @classmethod
    def canonical(cls, tensors: Mapping[str, Tensor], spec: Spec | None = None) -> dict[str, Tensor]:
        """The tensors of a file under the module's names; with a spec, also with their values in the module's order."""
        return dict(tensors)

    @classmethod
    def ignore_leftovers(cls, opened: OpenedHead[Spec]) -> None:
        """Notes in the account which tensors the head does not need, each with the reason."""

    # Reading.

    @classmethod
    def load(
        cls, folder: str, target: GenerativeModel, conventions: Any = None, *, packed: bool = True
    ) -> LoadedHead[Head]:
        """Loads the head in `folder` for `target`.

        Args:
            packed: whether matrices that a GGUF file has in blocks may stay so (`keep_packed`): to draft, not to train.
        Raises:
            CheckpointError: unreadable, or not what its layout has.
            TargetMismatchError: a target of another width, vocabulary or depth, or without an output layer.
        """
        opened = cls.open(folder, conventions, target)
        spec, choice = opened.spec, getattr(conventions, "embeddings", None)
        embed_tokens = shared_embeddings(opened, embedding_layer(target), choice, trained=spec.trains_embeddings)
        lm_head = shared_output(opened, output_layer(target), None if spec.own_output else target.dtype)
        loaded = cls.assemble(opened, embed_tokens, lm_head, last_device(target), target.dtype)
        if packed and opened.checkpoint.packed:
            keep_packed(loaded.head, opened.checkpoint.packed)
        return loaded

    @classmethod
    def open(cls, folder: str, conventions: Any = None, target: GenerativeModel | None = None) -> OpenedHead[Spec]:
        """Reads the files of a head. With a target, they are first checked against it. Raises as `load`."""
        conventions = conventions or cls.conventions_class()
        checkpoint = read_checkpoint(folder)
        spec = cls.describe(checkpoint, conventions)
        if target is not None:
            cls.check_fits(spec, target)
            check_stated_target(folder, checkpoint.config, target)
        checkpoint = dataclasses.replace(checkpoint, tensors=cls.canonical(checkpoint.tensors, spec))
        keys = KeyAccount(checkpoint, f"{spec.kind}, {spec.dialect}")
        return OpenedHead(spec, checkpoint, keys, draft_vocabulary(spec, checkpoint, keys))

    @classmethod
    def describe(cls, checkpoint: Checkpoint, conventions: Any) -> Spec:
        """The spec of a checkpoint; logs once what its files leave open.

        Raises:
            CheckpointError: not a head of this method, or a config that lacks or contradicts what the tensors need.
        """
        folder = checkpoint.folder
        shapes = {name: tuple(tensor.shape) for name, tensor in cls.canonical(checkpoint.tensors).items()}
        if not cls.recognizes(shapes):
            raise CheckpointError(f"{folder} holds no {cls.kind}: {listed(sorted(shapes), 8)} …")
        if not checkpoint.config:
            raise CheckpointError(
                f"{folder} has no config.json, which gives {cls.config_says}: copy it from where the head is from."
            )
        stated = HeadFacts.of(checkpoint, shapes, cls.section, cls.layer_type, cls.follows)
        try:
            spec = cls.spec_of(stated, conventions)
        except KeyError as error:
            raise CheckpointError(f"{folder}: the weights lack {error}.") from error
        for option, question in cls.unclear(stated, spec).items():
            if getattr(conventions, option) is None:
                logger.warning_once(
                    f"{folder}: its files do not state {question}. It is read with {option}={getattr(spec, option)!r}; "
                    f"if it drafts badly, give {option} yourself (`hf-speculate check` tries the others)."
                )
        return spec

    @classmethod
    def assemble(
        cls,
        opened: OpenedHead[Spec],
        embed_tokens: nn.Module | None,
        lm_head: nn.Module | None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> LoadedHead[Head]:
        """The head, with the given modules of the target or, where they are None, its own.

        Args:
            device, dtype: place and type of the weights; None keeps those of the files.
        Raises:
            CheckpointError: an unknown activation, RoPE parameters that give no angles, or missing, unknown and
                misshapen tensors.
        """
        keys = opened.keys
        head = built_head(cls.head_class, opened, embed_tokens, lm_head, cls.kind)
        cls.ignore_leftovers(opened)
        for name in opened.checkpoint.tensors:
            if name.endswith("rotary_emb.inv_freq"):
                keys.ignore(name, "recomputed from the config")
        weights = {name: keys.take(name, parameter.shape) for name, parameter in head.named_parameters()}
        report = keys.finish()
        # A copy: what was read may be mapped from a file that is rewritten later.
        placed = {name: weight.to(device=device, dtype=dtype, copy=True) for name, weight in weights.items()}
        head.load_state_dict(placed, strict=True, assign=True)
        head.rotary.to(device)
        head.requires_grad_(False).eval()
        ids = opened.target_ids
        return LoadedHead(head, None if ids is None else ids.to(device), report)

    @classmethod
    def check_fits(cls, spec: Spec, target: GenerativeModel) -> None:
        """Raises `TargetMismatchError` unless a head fits the target's features and its vocabulary."""
        cls.check_sizes(spec, target.config.get_text_config(decoder=True), type(target).__name__)

    @classmethod
    def check_sizes(cls, spec: Spec, config: Any, name: str) -> None:
        """The same check for the config of a text model; `name` is the target in messages."""
        head = f"{spec.kind} head"
        if spec.target_hidden_size != config.hidden_size:
            raise TargetMismatchError(
                f"this {head} was made for a target of hidden size {spec.target_hidden_size}, but {name} has "
                f"{config.hidden_size}."
            )
        check_head_vocabulary(f"this {head}", spec.vocab_size, name, config.vocab_size)
        depth = config.num_hidden_layers
        layers = spec.resolved_layers(depth)
        if min(layers) < 0 or max(layers) > depth:
            raise TargetMismatchError(
                f"this {head} reads the target's hidden states {list(layers)}, but {name} has {depth} layers, that is "
                f"hidden states 0 to {depth}."
            )
        token = spec.mask_token_id
        if token is not None and not 0 <= token < spec.vocab_size:
            raise TargetMismatchError(
                f"the mask token of this {head} is {token}, but it knows {spec.vocab_size} tokens."
            )

    # Writing.

    @classmethod
    def check_layout(cls, layout: str, spec: Spec, num_target_layers: int | None = None) -> str:
        """The layout by its own name; the name of a reader ("vllm") stands for the layout that it reads.

        Args:
            num_target_layers: depth of the target where it is known; the layers that the head reads are checked, too.
        Raises:
            CheckpointError: files of `layout` cannot express what a head of this spec computes.
        """
        layout = cls.readers.get(layout, layout)
        if layout not in cls.limits:
            readers = ", ".join(f"{reader!r} for {name!r}" for reader, name in cls.readers.items())
            raise CheckpointError(
                f"{cls.name}: unknown layout {layout!r}; known are {', '.join(map(repr, cls.limits))} ({readers})."
            )
        if problems := cls.problems(layout, spec):
            raise CheckpointError(f"the {layout} layout cannot express this head: it has {', '.join(problems)}.")
        return layout

    @classmethod
    def problems(cls, layout: str, spec: Spec) -> list[str]:
        """Names of the limits of a layout that a head exceeds."""
        return [name for name, is_needed in cls.limits[layout] if is_needed(spec)]

    @classmethod
    def write(
        cls, path: str | os.PathLike, head: Head, target_ids: Tensor | None, layout: str, **of_target: Any
    ) -> None:
        """Writes weights and config.json to the folder `path`, which is made.

        Args:
            target_ids: int64 [Vd], target id of each draft id; None where they are the same.
            layout: see `check_layout`.
            of_target: `num_target_layers`, depth of the target (None: unknown); `target_name` and
                `target_architectures` for layouts whose config names the target; `embeddings_were_trained`, whether
                the head's own embeddings are better than the target's; `vocabulary` and `out_type` for GGUF files
                (`write_checkpoint`).
        Raises:
            CheckpointError: the layout cannot express this head; the message gives the reason.
        """
        layout = cls.check_layout(layout, head.spec)
        file, tensors, config = cls.written(head, target_ids, layout, of_target)
        of_gguf = {name: of_target[name] for name in ("vocabulary", "out_type") if name in of_target}
        write_checkpoint(path, file, tensors, config, **of_gguf)

    @classmethod
    def stored(cls, head: Head, layout: str) -> dict[str, Tensor]:
        """The head's tensors, with those of the target that the layout stores."""
        spec, tensors, keeps = head.spec, dense_state(head, head.dtype), cls.stores(layout, head.spec)
        for name, module in head.shared.items():
            if module is not None and keeps[name]:
                if name == "embed_tokens":
                    rows = embedding_rows(module, spec.vocab_size)[: spec.vocab_size]
                else:
                    rows = output_rows(module, spec.hidden_size, head.dtype)[: spec.draft_vocab_size]
                tensors[f"{name}.weight"] = rows
        return tensors

    # Converting. No target model is loaded, and tensors keep their dtype.

    @classmethod
    def convert(
        cls,
        folder: str,
        path: str | os.PathLike,
        layout: str,
        target: TargetFiles | None = None,
        out_type: str = "f16",
    ) -> tuple[SavedHead, LoadReport]:
        """Writes the head in `folder` to the folder `path` in another layout, exactly but for `out_type`.

        Args:
            target: files of the target. They are needed where the layout stores parts that the head shares with the
                target, and where the target's depth decides which layers the head reads. They also show which of the
                file's tensors are mere copies.
            out_type: type of the matrices in a GGUF file (`OUT_TYPES`); other layouts keep that of the tensors.
        Raises:
            CheckpointError: unreadable; the layout cannot express the head; the target is needed and was not given.
            TargetMismatchError: the target is another one.
        """
        opened = cls.open(folder)
        layout = cls.check_layout(layout, opened.spec)
        if target is not None:
            cls.check_sizes(opened.spec, target.text_config, target.name)
        embed_tokens = cls._embeddings(opened, layout, target)
        loaded = cls.assemble(opened, embed_tokens, cls._output(opened, layout, target))
        config = ConfigValues(folder, opened.checkpoint.config)
        facts = facts_of_target(config, target)
        if layout == "llama.cpp":
            if target is None:
                raise target_needed(opened, layout, "tokenizer")
            facts |= {"vocabulary": target.vocabulary(opened.spec.vocab_size), "out_type": out_type}
        trained = embed_tokens is None and were_trained(opened, config, target)
        cls.write(path, loaded.head, loaded.target_ids, layout, **facts, embeddings_were_trained=trained)
        return SavedHead(opened.spec.algorithm, layout, facts["target_name"]), loaded.report

    @classmethod
    def saved(cls, folder: str) -> SavedHead:
        """Method, layout and target of the head in `folder`, as far as it names them."""
        opened = cls.open(folder)
        name = stated_name(ConfigValues(folder, opened.checkpoint.config))
        return SavedHead(opened.spec.algorithm, cls.layout_of(opened.spec), name)

    @classmethod
    def _embeddings(cls, opened: OpenedHead[Spec], layout: str, target: TargetFiles | None) -> nn.Module | None:
        """The target's embeddings if the file has none, or none worth keeping; None if its own are written."""
        spec, own = opened.spec, opened.checkpoint.tensors.get(_EMBEDDINGS)
        is_stored = cls.stores(layout, spec)["embed_tokens"]
        if own is None and not is_stored:
            opened.keys.share(_EMBEDDINGS, "not in the file")
            return nn.Embedding(spec.vocab_size, spec.hidden_size, device="meta")  # stands for the target's
        if target is None:
            if own is None:
                raise target_needed(opened, layout, _EMBEDDINGS)
            return None
        theirs = target.input_embeddings()
        if is_stored and own is not None and is_copy(own, theirs.weight):
            return None  # the file's rows are written as they are, bit for bit
        return shared_embeddings(opened, theirs, trained=spec.trains_embeddings)

    @classmethod
    def _output(cls, opened: OpenedHead[Spec], layout: str, target: TargetFiles | None) -> nn.Module | None:
        """The target's output matrix if the file has none, or a mere copy; None if its own is written."""
        spec, has_own = opened.spec, _OUTPUT in opened.checkpoint.tensors
        is_stored = cls.stores(layout, spec)["lm_head"]
        if has_own and (is_stored or target is None):
            return None
        if spec.own_output and spec.draft_vocab_size != spec.vocab_size:
            return None
        if not has_own and not is_stored:
            opened.keys.share(_OUTPUT, "not in the file")
            return nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False, device="meta")
        if target is None:
            raise target_needed(opened, layout, _OUTPUT)
        theirs = target.output_embeddings()
        return shared_output(opened, theirs, None if spec.own_output else theirs.weight.dtype)
