"""The `draft_model` drafter, a smaller causal LM, and the folders that hold such models."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from hf_speculate.cache import TreeCache
from hf_speculate.drafting import Conversations, Drafter, DraftRequest
from hf_speculate.errors import CheckpointError, OptionError, TargetMismatchError
from hf_speculate.files import file_names, listed, user_path
from hf_speculate.speculator import installed_drafters, load_drafter, local_folder, read_options
from hf_speculate.stats import Advice
from hf_speculate.target import GenerativeModel, supported_shape, unwrap

from ..checkpoints import ConfigValues, checkpoint_files, read_config, tensor_shapes
from ..origin import compare_weights, sample_weights
from .options import DraftModelOptions
from .pairing import find_translation
from .session import DraftModelSession
from .translated import TranslatedSession
from .translation import Translation


if TYPE_CHECKING:
    from typing_extensions import Self


# Files next to the weights of a model that can be used alone.
_TOKENIZER_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_SIZES = ("num_hidden_layers", "vocab_size", "intermediate_size", "hidden_size")
_MAX_PACKED = 32
_HEAD_TENSORS = ("fc.", "fusion_fc.", "midlayer.", "medusa_head.", "hidden_norm.")


def load_beside(place: str, target: GenerativeModel) -> GenerativeModel:
    """The causal LM of a folder, Hub id or GGUF file (its weights stay packed) for the target, see `load_model`."""
    place = user_path(place)
    if place.endswith(".gguf"):
        from hf_speculate_gguf import load_model as load_packed  # nothing else needs what it imports

        return load_packed(place, dtype=target.dtype, device=target.device)
    return load_model(local_folder(place), target)


def load_model(folder: str, target: GenerativeModel) -> GenerativeModel:
    """The causal LM in `folder` for the target: same dtype, same device.

    Raises:
        CheckpointError: unreadable, or a config that announces far more than the files hold.
    """
    _check_kind(folder)
    _check_sizes(folder)
    try:
        _check_shapes(folder)
        loading: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=target.dtype, trust_remote_code=False, output_loading_info=True
        )
        loaded, loading_info = loading
    except CheckpointError:
        raise
    except Exception as error:  # configs and files of models are wrong in more ways than transformers has errors
        raise CheckpointError(f"cannot load a draft model from {folder}: {error}") from error
    if missing := sorted(loading_info["missing_keys"]):  # transformers would draft with random ones
        raise CheckpointError(f"{folder}: config.json announces weights that the files lack: {listed(missing, 4)}.")
    return loaded.to(target.device)


def _check_kind(folder: str) -> None:
    """Raises `CheckpointError` for a folder without a model, and for a head, which other drafters draft with."""
    if DraftModelDrafter.recognizes(folder):
        return
    others = (name for name in installed_drafters() if name != DraftModelDrafter.name)
    if kind := next((name for name in others if load_drafter(name).recognizes(folder)), None):
        raise CheckpointError(
            f"{folder} is a head of the drafter {kind!r}, not a draft model: give it alone, speculator={folder!r}."
        )
    if "model_type" not in read_config(folder):
        files = file_names(folder)
        reason = "its config.json has no model_type" if "config.json" in files else "it has no config.json"
        raise CheckpointError(
            f"{folder} is not a draft model: {reason}. Give the folder of a causal LM, a Hub id or a GGUF file. Files "
            f"there: {listed(files, 6) or 'none'}."
        )


def _check_shapes(folder: str) -> None:
    """Raises `CheckpointError` for weights of other shapes than the config gives them; packed ones aside."""
    if "quantization_config" in read_config(folder):
        return
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        announced = AutoModelForCausalLM.from_config(config, trust_remote_code=False).state_dict()
    for name, shape in tensor_shapes(folder, strip=()).items():
        if name in announced and (wanted := tuple(announced[name].shape)) != shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {shape}, by config.json it has {wanted}: they do not belong together, or "
                "one of them was changed."
            )


def _check_sizes(folder: str) -> None:
    """Raises `CheckpointError` for a config that announces far more than the files hold, before anything is made."""
    shapes, config = tensor_shapes(folder), read_config(folder)
    nested = config.get("text_config")
    values = nested if isinstance(nested, dict) else config
    sizes = {name: size for name in _SIZES if isinstance(size := values.get(name), int)}
    # Weights of a few bits are packed, several in one value.
    most = _MAX_PACKED * sum(math.prod(shape) for shape in shapes.values())
    products = [("num_hidden_layers", sizes.get("num_hidden_layers", 0), len(shapes))]
    products += [(name, sizes.get(name, 0) * sizes.get("hidden_size", 1), most) for name in _SIZES[1:3]]
    for name, announced, stored in products:
        if shapes and announced > stored:
            raise CheckpointError(
                f"{folder}: {name} in config.json is {sizes[name]}, of which the {len(shapes)} tensors there do not "
                "hold the weights."
            )


class DraftModelDrafter(Drafter):
    """Drafts with a causal LM.

    Args:
        model: draft model.
        options: options of its drafts.
        translation: translation between the two vocabularies; None for a draft model of the target's vocabulary
            (padding rows at the end may differ).
    """

    name = "draft_model"
    drafts_ahead = True
    options_classes = (DraftModelOptions,)

    def __init__(
        self,
        model: GenerativeModel,
        options: DraftModelOptions | None = None,
        translation: Translation | None = None,
    ):
        shape, reason = supported_shape(model, DynamicCache(config=model.config))
        if shape == "single":
            raise TargetMismatchError(f"{type(model).__name__} cannot be a draft model: {reason}.")
        self.model = model.eval()
        self.options = options or DraftModelOptions()
        self.translation = translation
        if translation is not None and self.options.top_k > 1:
            raise OptionError(
                f"draft_model: top_k={self.options.top_k} asks for a tree, and a draft model of another vocabulary "
                "drafts chains only: leave top_k out."
            )
        self.conversations: Conversations[TreeCache] = Conversations()

    def __repr__(self) -> str:
        return f"DraftModelDrafter({type(self.model).__name__}, {self.options})"

    @property
    def advice(self) -> Advice:
        name = self.model.config.name_or_path or type(self.model).__name__
        return Advice(
            good=f"the draft model {name} saves more time than it costs",
            poor=f"The draft model {name} is too slow for this target, or writes another text: try a smaller one of "
            "the target's family, fewer tokens per draft (depth=), or prompt_lookup.",
            untried=f"The draft model {name} was not tried: the policy expected its drafts to take longer than they "
            "save. adaptive=False drafts in every round.",
        )

    @classmethod
    def for_target(cls, target: GenerativeModel, **options: Any) -> Self:
        """`model=` is the draft model, its path or Hub id, or a GGUF file. For one of another vocabulary, `tokenizer=`
        is the target's tokenizer and `draft_tokenizer=` the draft model's, or their folders; by default they come from
        where the models were loaded. The others are `DraftModelOptions`."""
        model = options.pop("model", None)
        tokenizers = options.pop("tokenizer", None), options.pop("draft_tokenizer", None)
        if model is None:
            raise OptionError(
                "draft_model needs the draft model: from_name('draft_model', target=..., model=...), or in a text "
                "draft_model:model=PATH."
            )
        parsed = read_options(DraftModelOptions, options, cls.name, also=["model", "tokenizer", "draft_tokenizer"])
        if isinstance(model, str | os.PathLike):
            _check_place(user_path(model), target)
            model = load_beside(os.fspath(model), target)
        translation = find_translation(target, model, tokenizers, difference(model, target))
        drafter = cls(model, parsed, translation)
        drafter._check_smaller(target)
        return drafter

    @classmethod
    def recognizes(cls, folder: str) -> bool:
        """Whether the config in `folder` names a causal LM, and its tensors are not heads of another method."""
        config = read_config(folder)
        names = ConfigValues(folder, config).texts("architectures")
        is_head = any(key in config for key in ("draft_vocab_size", "medusa_num_heads", "speculators_model_type"))
        if is_head or "model_type" not in config or not any(n.endswith("ForCausalLM") for n in names):
            return False
        # EAGLE-1 heads have the config of a Llama of one layer: only their tensors show it.
        return not any(name.startswith(_HEAD_TENSORS) for name in tensor_shapes(folder))

    @classmethod
    def files(cls, folder: str) -> list[str]:
        return [*checkpoint_files(folder), *_TOKENIZER_FILES]

    @classmethod
    def from_folder(cls, folder: str, target: GenerativeModel, **options: Any) -> Self:
        """Loads the draft model for the target: same dtype, same device."""
        return cls.for_target(target, model=folder, **options)

    def check_target(self, target: GenerativeModel) -> None:
        """Compares vocabularies: sizes (padding rows aside) and special token ids."""
        if self.translation is None:
            if problem := difference(self.model, target):
                raise TargetMismatchError(
                    f"{problem}; a draft model must share the target's tokenizer, unless both are known: build it with "
                    "from_name('draft_model', target=..., model=..., tokenizer=..., draft_tokenizer=...)."
                )
        elif (size := target.config.get_text_config(decoder=True).vocab_size) != len(self.translation.target.texts):
            raise TargetMismatchError(
                f"the target has a vocabulary of {size} tokens; this draft model was given the tokenizer of a target "
                f"with {len(self.translation.target.texts)}. Build the speculator again for this target."
            )

    def _check_smaller(self, target: GenerativeModel) -> None:
        """Raises `TargetMismatchError` for the target itself, and for equal weights that are not smaller: such a draft
        model is never faster."""
        ours, theirs = unwrap(self.model), unwrap(target)
        sizes = [model.get_memory_footprint(return_buffers=False) for model in (ours, theirs)]
        if ours is not theirs and (sizes[0] < sizes[1] or not _has_same_weights(ours, theirs)):
            return
        counts = [f"{model.num_parameters() / 1e6:.1f}M" for model in (ours, theirs)]
        raise TargetMismatchError(
            f"the draft model is the target itself ({counts[0]} parameters of {counts[1]}): drafting with it costs "
            "what it saves. Give a smaller model of the same tokenizer, or draft with 'prompt_lookup' or a head."
        )

    def start(self, request: DraftRequest) -> DraftModelSession:
        if self.translation is not None:
            return TranslatedSession(self.model, self.options, self.conversations, request, self.translation)
        return DraftModelSession(self.model, self.options, self.conversations, request)


def difference(model: GenerativeModel, target: GenerativeModel) -> str:
    """A clause on the difference between the vocabularies of a draft model and its target; "" if there is none."""
    ours, theirs = (m.config.get_text_config(decoder=True) for m in (model, target))
    # Checkpoints of one family pad the same tokenizer differently (Qwen2: 151936 and 152064 rows).
    if abs(ours.vocab_size - theirs.vocab_size) > 256:
        return f"the draft model has a vocabulary of {ours.vocab_size} tokens, the target of {theirs.vocab_size}"
    for name in ("bos_token_id", "eos_token_id"):
        mine, its = (_as_set(getattr(config, name, None)) for config in (ours, theirs))
        if mine and its and not mine & its:
            return (
                f"the draft model's {name} is {sorted(mine)}, the target's {sorted(its)}: they seem to have different "
                "tokenizers"
            )
    return ""


def _check_place(place: str, target: GenerativeModel) -> None:
    """Raises `TargetMismatchError` for the target's own place. A GGUF file may also be the draft model, packed."""
    own = getattr(unwrap(target), "name_or_path", "") or ""
    if (
        own
        and not own.endswith(".gguf")
        and (place == own or (os.path.exists(place) and os.path.realpath(place) == os.path.realpath(own)))
    ):
        raise TargetMismatchError(
            f"{place!r} holds the target itself, and a draft model is a smaller one. If its checkpoint has draft "
            "layers of its own, they draft with speculator='mtp'."
        )


def _has_same_weights(first: GenerativeModel, second: GenerativeModel) -> bool:
    if first.num_parameters() != second.num_parameters():
        return False
    are_same = compare_weights(sample_weights(first), sample_weights(second)).values()
    return bool(are_same) and all(are_same)


def _as_set(ids: int | Sequence[int] | None) -> set[int]:
    if ids is None:
        return set()
    return {ids} if isinstance(ids, int) else set(ids)
