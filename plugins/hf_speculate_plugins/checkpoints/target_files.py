"""Parts of a target that a conversion may need, read from its files: the config, and single tensors.

A target of many gigabytes is not loaded for one matrix: of a Hub repository only the config, the index and the one
shard that holds the tensor are downloaded.
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.hub import cached_file

from hf_speculate.errors import CheckpointError, DrafterNotFoundError, first_line
from hf_speculate.files import user_path
from hf_speculate.speculator import path_problem
from hf_speculate.target import embedding_layer, output_layer

from .files import read_config, read_index, read_tensor


_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


class TargetFiles:
    """The files of a target: a folder or Hub id, with the Hub's usual options.

    Raises:
        DrafterNotFoundError: no such folder or repository, or it has no model config.
        CheckpointError: the config of a folder is not JSON.
    """

    def __init__(self, name_or_path: str | os.PathLike, **hub: Any):
        self.name = user_path(name_or_path)
        self._hub = hub
        if problem := path_problem(self.name, hub.get("cache_dir")):
            raise DrafterNotFoundError(f"cannot read target: {self.name!r} {problem}")
        read_config(self.name)  # refuses files of a folder that transformers would wait for or recurse in
        try:
            self.config = AutoConfig.from_pretrained(self.name, **hub)
        except Exception as error:  # configs check themselves in several ways
            raise DrafterNotFoundError(f"cannot read target {self.name!r}: {first_line(error)}") from error

    @property
    def text_config(self) -> Any:
        """The config of the text model: hidden size, vocabulary, number of layers."""
        return self.config.get_text_config(decoder=True)

    @property
    def architectures(self) -> list[str]:
        return list(self.config.architectures or [])

    def input_embeddings(self) -> nn.Embedding:
        """The token embeddings; raises `CheckpointError` if the files do not hold them."""
        return nn.Embedding.from_pretrained(self._tensor(self._names[0]))

    def output_embeddings(self) -> nn.Linear:
        """The output matrix, for tied models that of the embeddings; raises like `input_embeddings`."""
        weight = self._tensor(self._names[0] if self.text_config.tie_word_embeddings else self._names[1])
        module = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
        module.weight = nn.Parameter(weight, requires_grad=False)
        return module

    def vocabulary(self, vocab_size: int) -> dict[str, Any]:
        """The tokenizer as metadata of a GGUF file, with an entry for each of `vocab_size` tokens.

        Raises:
            CheckpointError: there is no tokenizer, it has another number of tokens, or is of a kind that is not
                written.
        """
        from hf_speculate_gguf import describe_vocabulary  # a slow import that other conversions do without

        try:
            tokenizer = AutoTokenizer.from_pretrained(self._tokenizer_name, **self._hub)
        except Exception as error:  # transformers has several kinds of errors for it
            raise CheckpointError(f"cannot read the tokenizer of {self.name!r}: {first_line(error)}") from error
        return describe_vocabulary(tokenizer, vocab_size)

    @property
    def _tokenizer_name(self) -> str:
        return self.name

    @cached_property
    def _names(self) -> tuple[str, str]:
        """Names of the embeddings and of the output matrix, taken from a model without weights."""
        try:
            with torch.device("meta"):
                model: Any = AutoModelForCausalLM.from_config(self.config)
        except Exception as error:
            raise CheckpointError(
                f"the config of the target {self.name!r} makes no causal LM ({type(error).__name__}: {error})."
            ) from error
        embeddings, output = model.get_input_embeddings(), model.get_output_embeddings()
        names = {id(module): name for name, module in model.named_modules()}
        return f"{names[id(embeddings)]}.weight", f"{names[id(output)]}.weight"

    def _tensor(self, name: str) -> Tensor:
        tensor = read_tensor(self._file_with(name), name)
        if not tensor.is_floating_point():
            raise CheckpointError(f"the target's {name} is quantised ({tensor.dtype}): give the original model.")
        if tensor.dim() != 2:
            raise CheckpointError(f"the target's {name} has shape {tuple(tensor.shape)}, expected a matrix.")
        return tensor

    def _file_with(self, name: str) -> str:
        for file in _WEIGHTS:
            if index := self._file(f"{file}.index.json"):
                shard = read_index(index).get(name)
                if shard is None:
                    raise CheckpointError(f"the target's files ({self.name}) do not hold {name}.")
                if not (path := self._file(shard)):
                    raise CheckpointError(f"{index} names the file {shard!r}, which is not there.")
                return path
            if path := self._file(file):
                return path
        raise CheckpointError(f"{self.name} holds none of {', '.join(_WEIGHTS)}: it cannot be read as a target.")

    def _file(self, name: str) -> str | None:
        return cached_file(self.name, name, _raise_exceptions_for_missing_entries=False, **self._hub)


class LoadedTarget(TargetFiles):
    """The same parts of a model that is loaded, and whose matrices are not packed."""

    def __init__(self, model: Any, name: str):
        self.name, self.config = name, model.config
        self._model, self._hub = model, {}

    @property
    def architectures(self) -> list[str]:
        return [type(self._model).__name__]

    def input_embeddings(self) -> nn.Embedding:
        return embedding_layer(self._model)

    def output_embeddings(self) -> nn.Linear:
        return output_layer(self._model)

    def vocabulary(self, vocab_size: int) -> dict[str, Any]:
        path = self._tokenizer_name
        if not path.endswith(".gguf"):
            return super().vocabulary(vocab_size)
        from hf_speculate_gguf import read_header, vocabulary_of

        metadata = vocabulary_of(read_header(path))
        count = len(metadata.get("tokenizer.ggml.tokens", ()))
        if count != vocab_size:
            raise CheckpointError(f"the tokenizer in {path} has {count} tokens, and the head knows {vocab_size}.")
        return metadata

    @property
    def _tokenizer_name(self) -> str:
        return self._model.name_or_path or self.name
