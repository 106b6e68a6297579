"""Chat templates that came with a head: rendered in transformers' sandbox, within bounds of time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_speculate.errors import SpeculateError


_WORKER = Path(__file__).with_name("template_worker.py")
# Importing transformers takes a second or two of them.
_SECONDS = 30.0


def foreign_chat_ids(
    conversations: Sequence[Sequence[dict[str, Any]]], tokenizer: Any, template: str, seconds: float = _SECONDS
) -> list[Tensor]:
    """int64 [S] of each chat through `template`, up to where the answer begins.

    The sandbox keeps a template from the machine's files, but not from looping or from filling the memory: it runs in
    a process of its own, which is ended after `seconds`.

    Raises:
        SpeculateError: the template raises, takes too long or too much memory.
    """
    # Chats of prompts are plain values; special tokens are texts.
    asked = {"template": template, "conversations": conversations, "tokens": tokenizer.special_tokens_map}
    try:
        done = subprocess.run(
            [sys.executable, str(_WORKER)], input=json.dumps(asked), capture_output=True, text=True, timeout=seconds
        )
        answer = json.loads(done.stdout or '{"error": "its process was ended"}')
    except subprocess.TimeoutExpired:
        answer = {"error": f"it took more than {seconds:g} seconds"}
    if "error" in answer:
        raise SpeculateError(f"the head's chat template cannot be used: {answer['error']}.")
    return [tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0] for text in answer["texts"]]
