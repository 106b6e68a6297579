#!/usr/bin/env python
"""Train the two bundled models: `pycoder`, a small real target, and `pycoder-draft`, a draft model for it.

What: two stock `Qwen2ForCausalLM` that write Python. The target is deep and narrow (20 layers x hidden 192, 8.7 M
parameters): like in real models a decoding step is many layers. The draft model has 2 and learns the target's output.

Why: speed and acceptance of speculative decoding mean nothing on random weights, whose text nobody can predict. These
models are predictable in the way real ones are, and anyone can rebuild them without a download: the corpus is the
source of the Python standard library that runs this script (PSF licence).

How (2 CPU cores; the times are in the model cards):

    python examples/train_bundled.py                      # examples/pycoder
    python examples/train_bundled.py --draft              # examples/pycoder-draft, needs the target
    python examples/train_bundled.py --steps 20 --out /tmp/smoke
    python examples/train_bundled.py --write-corpus runs/pycoder-data  # what heads are trained on, as JSON lines

The schedule is warm-up, constant, linear decay to 0, in steps: until the decay begins, a run does not depend on
`--steps`, so `--resume` with another `--steps` gives what a run with that number would have given from the start.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import logging
import math
import platform
import sysconfig
import time
import tokenize
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer


logger = logging.getLogger("train_bundled")

HERE = Path(__file__).resolve().parent
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 4096
MAX_POSITIONS = 1024
EXCLUDED_FOLDERS = {"encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests", "turtledemo"}
EXCLUDED_FILES = {"html/entities.py", "locale.py", "stringprep.py"}  # data tables

Texts = dict[str, str]  # path in the standard library -> source
Loss = Callable[[Qwen2ForCausalLM, torch.Tensor], torch.Tensor]  # (model, input ids [B, T]) -> nats per token


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a run depends on, next to the corpus."""

    steps: int
    num_layers: int
    matrix_lr: float
    other_lr: float
    batch_tokens: int = 4096
    length: int = 256
    decay_length: int = 512  # longer contexts at the end, where they are cheap to learn
    warmup_steps: int = 50
    decay_fraction: float = 0.35
    seed: int = 0

    @property
    def decay_start(self) -> int:
        return self.steps - math.ceil(self.steps * self.decay_fraction)

    def lr_scale(self, step: int) -> float:
        return min(1.0, (step + 1) / self.warmup_steps, (self.steps - step) / (self.steps - self.decay_start))

    def length_at(self, step: int) -> int:
        return self.decay_length if step >= self.decay_start else self.length


TARGET = Recipe(steps=1100, num_layers=20, matrix_lr=6e-3, other_lr=3e-3)
DRAFT = Recipe(steps=2000, num_layers=2, matrix_lr=4e-3, other_lr=2e-3, batch_tokens=1024)


def read_corpus() -> Texts:
    """The standard library's modules, by path; `tokenize.open` honours their encoding declarations."""
    root = Path(sysconfig.get_paths()["stdlib"])
    corpus = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        is_table = name in EXCLUDED_FILES or name.startswith("_sysconfigdata")
        if is_table or not EXCLUDED_FOLDERS.isdisjoint(name.split("/")):
            continue
        with tokenize.open(path) as file:
            if text := file.read().strip():
                corpus[name] = text + "\n"
    if not corpus:
        raise SystemExit(f"no Python source found under {str(root)!r}: the interpreter came without it")
    return corpus


def is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < 3


def fingerprint(corpus: Texts) -> str:
    return hashlib.sha256("".join(f"{name}\0{text}\0" for name, text in sorted(corpus.items())).encode()).hexdigest()


def write_corpus(corpus: Texts, folder: Path) -> None:
    """train.jsonl and eval.jsonl (the held-out files), a line a file of the standard library."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, held_out in (("train", False), ("eval", True)):
        lines = [json.dumps({"text": text, "name": n}) for n, text in corpus.items() if is_held_out(n) == held_out]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        logger.info("%s: %d files", folder / f"{split}.jsonl", len(lines))


def num_bytes(texts: Texts) -> int:
    return sum(len(text.encode()) for text in texts.values())


def train_tokenizer(texts: Iterable[str]) -> Qwen2Tokenizer:
    """Byte-level BPE behind Qwen2's own pre-tokenizer: the one that `AutoTokenizer` gives a model of this type."""
    blank = Qwen2Tokenizer(unk_token=None, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
    tokenizer = blank.train_new_from_iterator(texts, VOCAB_SIZE, show_progress=False)
    tokenizer.model_max_length = MAX_POSITIONS
    return tokenizer


def encode(tokenizer: Qwen2Tokenizer, texts: Texts) -> list[torch.Tensor]:
    """One tensor of ids per document, each beginning with the separator."""
    encoded = tokenizer(list(texts.values()), verbose=False)["input_ids"]
    return [torch.tensor([tokenizer.eos_token_id, *ids]) for ids in encoded]


class Batches:
    """Blocks of packed documents, both shuffled anew in each epoch; a batch is a function of the step alone."""

    def __init__(self, documents: list[torch.Tensor], recipe: Recipe):
        self.documents, self.recipe = documents, recipe
        self.num_tokens = sum(map(len, documents))
        self.key: tuple[int, int] | None = None

    def __getitem__(self, step: int) -> torch.Tensor:
        length = self.recipe.length_at(step)
        steps_per_epoch = self.num_tokens // self.recipe.batch_tokens
        epoch, index = divmod(step, steps_per_epoch)
        if self.key != (epoch, length):
            self.blocks, self.key = self._pack(epoch, length), (epoch, length)
        rows = self.recipe.batch_tokens // length
        return self.blocks[index * rows : (index + 1) * rows]

    def _pack(self, epoch: int, length: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.recipe.seed + epoch)
        order = torch.randperm(len(self.documents), generator=generator).tolist()
        stream = torch.cat([self.documents[i] for i in order])
        blocks = stream[: len(stream) // length * length].view(-1, length)
        return blocks[torch.randperm(len(blocks), generator=generator)]


def build_model(tokenizer: Qwen2Tokenizer, num_layers: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # eager: its backward pass is twice as fast as that of sdpa on a CPU, for heads this small
    model = Qwen2ForCausalLM._from_config(config, attn_implementation="eager")
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    for layer in model.model.layers:  # every layer begins as the identity, which makes 20 of them easy to train
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def build_draft(target: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, num_layers: int) -> Qwen2ForCausalLM:
    """Begin with the target's embedding, final norm, first and last layers: most of what a short training needs."""
    draft = build_model(tokenizer, num_layers)
    draft.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    draft.model.norm.load_state_dict(target.model.norm.state_dict())
    for i, layer in enumerate(draft.model.layers):
        source = round(i * (target.config.num_hidden_layers - 1) / max(num_layers - 1, 1))
        layer.load_state_dict(target.model.layers[source].state_dict())
    return draft


def next_token_loss(model: Qwen2ForCausalLM, input_ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten())


def distillation_loss(target: Qwen2ForCausalLM) -> Loss:
    """Cross-entropy against the target's distribution: the KL divergence plus a constant."""

    def loss(draft: Qwen2ForCausalLM, input_ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target_probs = target(input_ids, use_cache=False).logits.float().softmax(-1)
        draft_logits = draft(input_ids, use_cache=False).logits.float()
        return F.cross_entropy(draft_logits.flatten(0, 1), target_probs.flatten(0, 1))

    return loss


def build_optimizers(model: Qwen2ForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding, the norms and the biases."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim == 1] + [model.model.embed_tokens.weight]
    muon = torch.optim.Muon(matrices, lr=recipe.matrix_lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=recipe.other_lr, weight_decay=0.0, betas=(0.9, 0.95))
    return [muon, adamw]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Where a run writes, and how often."""

    out: Path
    checkpoint: Path
    resume: bool
    log_every: int = 25
    save_every: int = 100

    def save(self, model: Qwen2ForCausalLM, optimizers: list[torch.optim.Optimizer], step: int) -> None:
        state = {"step": step, "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
        torch.save(state, self.out / "checkpoint.partial")
        (self.out / "checkpoint.partial").replace(self.checkpoint)
        self.export(model)

    def load(self, model: Qwen2ForCausalLM, optimizers: list[torch.optim.Optimizer]) -> int:
        if not self.checkpoint.exists():
            raise SystemExit(f"--resume: no checkpoint {str(self.checkpoint)!r}; start without --resume")
        state = torch.load(self.checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, optimizer_state in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
        return state["step"]

    def export(self, model: Qwen2ForCausalLM) -> None:
        """Write the model in bfloat16, as `from_pretrained` reads it."""
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(self.out)


def train(
    model: Qwen2ForCausalLM, batches: Batches, held_out: list[torch.Tensor], loss_fn: Loss, recipe: Recipe, run: Run
) -> None:
    optimizers = build_optimizers(model, recipe)
    base_lrs = [recipe.matrix_lr, recipe.other_lr]
    start = run.load(model, optimizers) if run.resume else 0
    model.train()
    losses, since = [], time.perf_counter()
    for step in tqdm(range(start, recipe.steps), initial=start, total=recipe.steps, unit="step", disable=None):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_fn(model, batches[step])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, base_lr in zip(optimizers, base_lrs, strict=True):
            optimizer.param_groups[0]["lr"] = base_lr * recipe.lr_scale(step)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % run.log_every == 0:
            speed = len(losses) * recipe.batch_tokens / (time.perf_counter() - since)
            logger.info("step %d: loss %.3f, %.0f tokens/s", step + 1, sum(losses) / len(losses), speed)
            losses, since = [], time.perf_counter()
        if (step + 1) % run.save_every == 0 and step + 1 < recipe.steps:
            logger.info("step %d: held-out sample %.3f nats/token", step + 1, evaluate(model, held_out[:4])["nats"])
            run.save(model, optimizers, step + 1)
            since = time.perf_counter()


@torch.inference_mode()
def evaluate(
    model: Qwen2ForCausalLM, documents: list[torch.Tensor], target: Qwen2ForCausalLM | None = None
) -> dict[str, float]:
    """Mean nats per token over windows of 512 tokens and, with a target, how often both choose the same token."""
    nats, num_tokens, num_agreed = 0.0, 0, 0
    windows = [window for document in documents for window in document.split(512) if len(window) > 1]
    with torch.autocast("cpu", torch.bfloat16):
        for window in windows:
            logits = model(window[None], use_cache=False).logits[0, :-1].float()
            nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
            num_tokens += len(logits)
            if target is not None:
                target_choices = target(window[None], use_cache=False).logits[0, :-1].argmax(-1)
                num_agreed += int((logits.argmax(-1) == target_choices).sum())
    return {"nats": nats / num_tokens} | ({"agreement": num_agreed / num_tokens} if target is not None else {})


def report(run: Run, tokenizer: Qwen2Tokenizer, splits: dict[str, Texts], target: Qwen2ForCausalLM | None) -> None:
    """Measure the files that were written, not the model in memory."""
    model = Qwen2ForCausalLM.from_pretrained(run.out, dtype=torch.float32)
    size = (run.out / "model.safetensors").stat().st_size
    logger.info("%d parameters, model.safetensors %d bytes", model.num_parameters(), size)
    for split, texts in splits.items():
        documents = encode(tokenizer, texts)
        figures = evaluate(model, documents, target)
        figures["bits_per_byte"] = figures["nats"] / math.log(2) * sum(map(len, documents)) / num_bytes(texts)
        logger.info("%s: %s", split, json.dumps({name: round(value, 4) for name, value in figures.items()}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", action="store_true", help="train the draft model on the target's distribution")
    parser.add_argument("--target", type=Path, default=HERE / "pycoder", help="with --draft: the folder of the target")
    parser.add_argument("--out", type=Path, help="folder to write (default: examples/pycoder or pycoder-draft)")
    parser.add_argument("--steps", type=int, help=f"training steps (default: {TARGET.steps}, draft {DRAFT.steps})")
    parser.add_argument("--layers", type=int, help="number of layers")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--write-corpus", type=Path, metavar="DIR", help="only write the corpus as JSON lines")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if args.write_corpus is not None:
        write_corpus(read_corpus(), args.write_corpus)
        return
    recipe = DRAFT if args.draft else TARGET
    recipe = replace(recipe, steps=args.steps or recipe.steps, num_layers=args.layers or recipe.num_layers)
    out = args.out or HERE / ("pycoder-draft" if args.draft else "pycoder")
    run = Run(out=out, checkpoint=out / "checkpoint.pt", resume=args.resume)
    torch.manual_seed(recipe.seed)
    logger.info("%s", recipe)

    corpus = read_corpus()
    held_out = {name: text for name, text in corpus.items() if is_held_out(name)}
    train_texts = {name: text for name, text in corpus.items() if name not in held_out}
    logger.info("python %s, torch %s, corpus %s", platform.python_version(), torch.__version__, fingerprint(corpus))
    logger.info("%d files, %d bytes; held out: %s", len(corpus), num_bytes(corpus), " ".join(held_out))
    if args.draft:
        if not (args.target / "config.json").exists():
            raise SystemExit(f"--draft: no target in {str(args.target)!r}; train it first, without --draft")
        tokenizer = AutoTokenizer.from_pretrained(args.target)
        target = Qwen2ForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
        model, loss_fn = build_draft(target, tokenizer, recipe.num_layers), distillation_loss(target)
    else:
        tokenizer, target = train_tokenizer(train_texts.values()), None
        model, loss_fn = build_model(tokenizer, recipe.num_layers), next_token_loss
    tokenizer.save_pretrained(out)
    batches = Batches(encode(tokenizer, train_texts), recipe)
    logger.info("%d training tokens, vocabulary of %d", batches.num_tokens, len(tokenizer))

    train(model, batches, encode(tokenizer, held_out), loss_fn, recipe, run)
    run.export(model)
    run.checkpoint.unlink(missing_ok=True)
    report(run, tokenizer, {"train sample": dict(list(train_texts.items())[::100]), "held-out": held_out}, target)


if __name__ == "__main__":
    main()
