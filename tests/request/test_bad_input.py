"""One clear error for each thing that cannot work: what was asked, what was found, what is possible."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    DynamicCache,
    QuantizedCache,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_speculate import AutoSpeculator, Speculator, attach
from hf_speculate.cache import CACHE_NAME, as_cache
from hf_speculate.errors import (
    CheckpointError,
    DrafterNotFoundError,
    OptionError,
    TargetMismatchError,
    UnsupportedRequestError,
)
from hf_speculate.testing import EmptyDrafter
from hf_speculate_plugins.draft_model import DraftModelDrafter

from ..support.tiny_heads import write_eagle_head


UNSUPPORTED = {
    "beams": ({"num_beams": 2}, "beam_search"),
    "assisted": ({"prompt_lookup_num_tokens": 3}, "assisted"),
    "static cache elsewhere": ({"cache_implementation": "offloaded_static"}, "only 'dynamic' .* and 'static'"),
    "offloaded cache": ({"cache_implementation": "offloaded"}, "offloaded"),
    "quantized cache": ({"cache_implementation": "quantized"}, "quantized"),
    "paged cache": ({"cache_implementation": "paged"}, "paged"),
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "synced_gpus": ({"synced_gpus": True}, "synced_gpus"),
    "custom generate": ({"custom_generate": lambda *args, **kwargs: None}, "custom_generate"),
}


@pytest.fixture
def no_forward(tiny_model, monkeypatch):
    """A model that must not be run: errors come before any work."""
    model = copy.deepcopy(tiny_model())
    monkeypatch.setattr(model, "forward", lambda *args, **kwargs: pytest.fail("the model was run"))
    return model


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_requests_are_refused_before_any_work(no_forward, prompt, name):
    kwargs, words = UNSUPPORTED[name]
    with pytest.raises(UnsupportedRequestError, match=words):
        no_forward.generate(prompt(6), max_new_tokens=4, speculator=Speculator(EmptyDrafter()), **kwargs)


@pytest.mark.parametrize(
    ("given", "owner", "text"),
    [
        ({"exact": True}, "speculators", "speculator='suffix:exact=true'"),
        ({"acceptance": "typical"}, "speculators", "speculator='suffix:acceptance=typical'"),
        ({"adaptive": False}, "speculators", "speculator='suffix:adaptive=false'"),
        ({"max_ngram": 3}, "'prompt_lookup'", r"AutoSpeculator.from_pretrained\(NAME_OR_PATH"),
        (
            {"corpus": ["text"]},
            "'suffix'",
            r"AutoSpeculator.from_pretrained\('suffix', .*corpus=\['text'\]\)",
        ),
    ],
)
def test_options_of_speculators_given_to_generate_say_where_they_go(no_forward, prompt, given, owner, text):
    (name,) = given
    words = f"^{name}=.* was given to generate, and is an option of {owner}: it goes with the speculator, {text}"
    with pytest.raises(OptionError, match=words):
        no_forward.generate(prompt(6), max_new_tokens=4, speculator="suffix", **given)
    attach(no_forward, Speculator(EmptyDrafter()))
    with pytest.raises(OptionError, match=f"goes with the speculator, AutoSpeculator.from_pretrained.*{name}="):
        no_forward.generate(prompt(6), max_new_tokens=4, **given)


def test_names_that_the_request_or_the_model_takes_are_theirs(tiny_model, prompt, monkeypatch):
    """`top_k` and `tokenizer` are options of drafters as well."""
    model, seen = copy.deepcopy(tiny_model()), []
    forward = model.forward

    def with_depth(*args, depth=None, **kwargs):
        seen.append(depth)
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", with_depth)
    of_request = {"top_k": 3, "tokenizer": object(), "do_sample": True, "exact": None}
    model.generate(prompt(6), max_new_tokens=4, speculator="suffix", depth=7, **of_request)
    assert 7 in seen


def test_a_quantized_cache_is_refused(no_forward, prompt):
    cache = QuantizedCache.__new__(QuantizedCache)  # building one needs an optional package
    cache.layers, cache.offloading, cache.layer_class_to_replicate = [], False, None
    with pytest.raises(UnsupportedRequestError, match="QuantizedCache"):
        no_forward.generate(prompt(6), max_new_tokens=4, **as_cache(cache), speculator="prompt_lookup")


def test_encoder_decoder_models_are_refused(prompt):
    config = T5Config(vocab_size=96, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    with pytest.raises(UnsupportedRequestError, match="encoder-decoder"):
        model.generate(prompt(6), max_new_tokens=4, speculator="prompt_lookup")


@pytest.mark.parametrize("num_cached", [6, 8])
def test_a_prompt_that_is_not_longer_than_the_cache_is_refused(tiny_model, prompt, num_cached):
    model, cache = tiny_model(), DynamicCache(config=tiny_model().config)
    model(prompt(num_cached), **as_cache(cache))
    with pytest.raises(UnsupportedRequestError, match=f"6 tokens but {CACHE_NAME} already holds {num_cached}"):
        model.generate(prompt(num_cached)[:, :6], max_new_tokens=4, **as_cache(cache), speculator="prompt_lookup")
    assert cache.get_seq_length() == num_cached


@pytest.mark.parametrize("argument", [3, 0.5, ["prompt_lookup"], EmptyDrafter()])
def test_things_that_are_no_speculator_are_refused(tiny_model, prompt, argument):
    with pytest.raises(TypeError, match=r"speculator= takes a Speculator"):
        tiny_model().generate(prompt(4), max_new_tokens=2, speculator=argument)


def test_a_model_is_no_speculator_and_how_to_draft_with_it_is_said(tiny_model, prompt):
    model, draft = tiny_model(), tiny_model(num_layers=1)
    takers = {
        "speculator=": lambda: model.generate(prompt(4), max_new_tokens=2, speculator=draft),
        "speculator= ": lambda: attach(model, draft),
        "Speculator": lambda: Speculator(draft),
        "from_name": lambda: AutoSpeculator.from_name(draft, target=model),
        "from_pretrained": lambda: AutoSpeculator.from_pretrained(draft, target=model),
    }
    hint = r"AutoSpeculator\.from_name\('draft_model', target=\.\.\., model=\.\.\.\)"
    for name, take in takers.items():
        with pytest.raises(TypeError, match=rf"^{name.strip()} takes no model, got LlamaForCausalLM\. .*{hint}"):
            take()
    with pytest.raises(TypeError, match=r"parts= takes .*got LlamaForCausalLM.*\('draft_model', \{'model': \.\.\.\}\)"):
        AutoSpeculator.from_name("combined", target=model, parts=[draft, "suffix"])
    parts = [("draft_model", {"model": draft}), "suffix"]
    assert len(AutoSpeculator.from_name("combined", target=model, parts=parts).drafter.parts) == 2


def test_a_path_that_does_not_exist_is_named(tiny_model, tmp_path):
    with pytest.raises(DrafterNotFoundError, match="is not a folder"):
        AutoSpeculator.from_pretrained(tmp_path / "nothing", target=tiny_model())


def test_a_folder_that_no_drafter_recognises_is_named(tiny_model, tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"recognises the checkpoint .*notes\.txt"):
        AutoSpeculator.from_pretrained(tmp_path, target=tiny_model())


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_pointer_of_git_lfs_is_named(tiny_model, tmp_path, name):
    folder = write_eagle_head(tmp_path / "head", 32, 96)
    (tmp_path / "head" / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match=rf"{name} is a pointer of Git-LFS, .* `git lfs pull`"):
        AutoSpeculator.from_pretrained(folder, target=tiny_model())


def test_a_head_without_config_or_weights_is_refused(tiny_model, tmp_path):
    folder = write_eagle_head(tmp_path / "head", 32, 96)
    (tmp_path / "head" / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(
        CheckpointError, match=r"head has no config\.json, which gives num_attention_heads and RoPE: copy it"
    ):
        AutoSpeculator.from_pretrained(folder, target=tiny_model())
    tiny_model(seed=1).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"recognises .* it has no config\.json \(it has .*Copy it"):
        AutoSpeculator.from_pretrained(tmp_path / "model", target=tiny_model())
    (tmp_path / "head" / "model.safetensors").rename(tmp_path / "head" / "model.zip")
    with pytest.raises(CheckpointError, match=r"it has no weights \(\*\.safetensors, .*\); files: model\.zip"):
        AutoSpeculator.from_pretrained(folder, target=tiny_model())


def test_a_head_of_a_kind_that_nobody_reads(tiny_model, tmp_path):
    save_file({"hidden_norm.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architectures": ["DFlashDraftModel"], "speculators_model_type": "peagle"}')
    message = r"config\.json names peagle / DFlashDraftModel, .* The nearest is 'eagle', whose tensors it does not have"
    with pytest.raises(CheckpointError, match=message):
        AutoSpeculator.from_pretrained(tmp_path, target=tiny_model())


def test_error_for_a_folder_without_weights_lists_some_files(tiny_model, tmp_path):
    for number in range(20):
        (tmp_path / f"page-{number:02}.md").touch()
    with pytest.raises(CheckpointError, match=r"it has no weights .*page-05\.md and 14 more\.$"):
        AutoSpeculator.from_pretrained(tmp_path, target=tiny_model())


def test_hub_ids_offline_get_an_error_with_the_download_command(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = r"'owner/head' is not a folder.*not in the cache and is not requested \({}\): .*`hf download owner/head`"
    with pytest.raises(DrafterNotFoundError, match=message.format("HF_HUB_OFFLINE is set")):
        AutoSpeculator.from_pretrained("owner/head", target=tiny_model(), cache_dir=tmp_path)
    with pytest.raises(DrafterNotFoundError, match=message.format("local_files_only=True")):
        AutoSpeculator.from_pretrained("owner/head", target=tiny_model(), cache_dir=tmp_path, local_files_only=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "heads" / "my-eagle3").mkdir(parents=True)
    with pytest.raises(DrafterNotFoundError, match=r"is not a folder here \(Did you mean 'heads/my-eagle3'\?\)"):
        AutoSpeculator.from_pretrained("heads/my-eagle", target=tiny_model(), cache_dir=tmp_path)
    with pytest.raises(DrafterNotFoundError, match=f"'owner/head' is not a folder in {tmp_path}, and"):
        AutoSpeculator.from_pretrained("owner/head", target=tiny_model(), cache_dir=tmp_path)
    with pytest.raises(DrafterNotFoundError, match=r"'eagle3'\. Installed: .*'eagle'.*There is no folder"):
        AutoSpeculator.from_pretrained("eagle3", target=tiny_model(), cache_dir=tmp_path)


def test_unknown_and_impossible_options_are_refused(tiny_model):
    with pytest.raises(TypeError, match="max_gram"):
        AutoSpeculator.from_name("prompt_lookup", target=tiny_model(), max_gram=3)
    with pytest.raises(ValueError, match=r"min_ngram \(4\) is above max_ngram \(3\)"):
        AutoSpeculator.from_name("prompt_lookup", target=tiny_model(), min_ngram=4, max_ngram=3)
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        AutoSpeculator.from_name("draft_model", target=tiny_model(), model=tiny_model(seed=1), depth=0)
    with pytest.raises(TypeError, match="needs the draft model"):
        AutoSpeculator.from_name("draft_model", target=tiny_model())


def test_a_draft_model_of_another_vocabulary_is_refused(tiny_model, prompt):
    target, other = tiny_model(), tiny_model(vocab_size=600)
    with pytest.raises(TargetMismatchError, match=r"600 tokens, the target of 96"):
        AutoSpeculator.from_name("draft_model", target=target, model=other)
    # The check is also made when a finished speculator meets another target.
    speculator = Speculator(DraftModelDrafter(other))
    with pytest.raises(TargetMismatchError, match="600"):
        target.generate(prompt(4), max_new_tokens=2, speculator=speculator)


def test_a_draft_model_of_another_tokenizer_is_refused(tiny_model):
    other = copy.deepcopy(tiny_model(seed=1))
    other.config.bos_token_id = 7
    with pytest.raises(TargetMismatchError, match=r"bos_token_id is \[7\], the target's \[1\]"):
        AutoSpeculator.from_name("draft_model", target=tiny_model(), model=other)


def test_misspelt_generate_arguments_are_still_stocks_error(tiny_model, prompt):
    with pytest.raises(ValueError, match="max_new_token"):
        tiny_model().generate(prompt(4), max_new_token=4, speculator="prompt_lookup")
