"""A real llama.cpp runs the heads that we write, and accepts as many of their tokens as our chains have.

`LLAMA_SERVER` names the program: b11434 or later, such as one compiled from the sources that llama-cpp-python holds.
llama.cpp's kernels round otherwise than ours, so texts and drafts differ where two tokens are nearly as probable.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_speculate import AutoSpeculator, load_gguf
from hf_speculate_gguf.named import SMOLLM2
from hf_speculate_tools.commands import builtin_prompts, chat_ids
from hf_speculate_tools.heads.convert import convert_checkpoint

from ..support.llamacpp import SERVER, drafted, write_target
from ..support.paths import REPOSITORY


EXAMPLES = REPOSITORY / "examples"
CLOSE = 0.03  # of the accepted tokens

pytestmark = pytest.mark.skipif(SERVER is None, reason="LLAMA_SERVER does not name llama.cpp's llama-server")


def accepted_here(path, head, depth: int, prompts, answers) -> int:
    """Tokens of our chains that the target accepts in texts as long as llama.cpp's."""
    model, _ = load_gguf(path, dtype=torch.float32)
    chain = {"depth": depth, "top_k": 1, "max_nodes": depth}
    speculator = AutoSpeculator.from_pretrained(head, target=model, adaptive=False, **chain)
    for prompt, answer in zip(prompts, answers, strict=True):
        model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=len(answer["tokens"]),
            eos_token_id=None,
            pad_token_id=0,
            speculator=speculator,
        )
    return speculator.stats.accepted_tokens


def check(target: Path, head: Path, kind: str, depth: int, prompts, max_new_tokens: int, log: Path) -> None:
    answers = drafted(target, head, kind, depth, prompts, max_new_tokens, log)
    theirs = sum(answer["draft_n_accepted"] for answer in answers)
    ours = accepted_here(target, head, depth, prompts, answers)
    assert theirs == pytest.approx(ours, rel=CLOSE), f"llama.cpp accepted {theirs} tokens, we {ours}"


@pytest.mark.parametrize(
    ("name", "kind", "depth", "out_type"),
    [
        ("pycoder-eagle3", "draft-eagle3", 5, "f32"),
        ("pycoder-eagle3", "draft-eagle3", 5, "q4_0"),
        ("pycoder-dspark", "draft-dspark", 7, "f32"),
    ],
)
def test_llamacpp_accepts_drafts_of_pycoder_heads(name, kind, depth, out_type, tmp_path):
    folder = EXAMPLES / "pycoder"
    tokenizer, target = AutoTokenizer.from_pretrained(folder), tmp_path / "target.gguf"
    write_target(target, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer)
    convert_checkpoint(EXAMPLES / name, tmp_path / "head", "llama.cpp", folder, out_type=out_type)
    prompts = [tokenizer(prompt.content).input_ids for prompt in builtin_prompts()]
    check(target, tmp_path / "head" / "draft.gguf", kind, depth, prompts, 128, tmp_path / "server.log")


@pytest.mark.skipif(SMOLLM2.find() is None, reason=f"SmolLM2 is not on this machine: {SMOLLM2.install}")
def test_llamacpp_accepts_drafts_of_a_head_with_a_draft_vocabulary(tmp_path):
    """smollm2-eagle3 has no matrix of its own: its file gets the target's rows."""
    target = Path(str(SMOLLM2.find()))
    convert_checkpoint(EXAMPLES / "smollm2-eagle3", tmp_path / "head", "llama.cpp", target)
    _, tokenizer = load_gguf(target)
    chats = builtin_prompts(4, chat=True)
    prompts = [chat_ids(prompt.messages, tokenizer).tolist() for prompt in chats]
    check(target, tmp_path / "head" / "draft.gguf", "draft-eagle3", 4, prompts, 96, tmp_path / "server.log")
