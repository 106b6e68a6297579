"""Any head: a clear error, at once and in little memory, or a head that drafts; the text stays the target's."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_speculate import AutoSpeculator
from hf_speculate.errors import CheckpointError, SpeculateError
from hf_speculate_plugins.eagle import EagleDrafter
from hf_speculate_plugins.medusa import MedusaHeads
from hf_speculate_plugins.medusa.saving import write_heads
from hf_speculate_tools.heads.convert import convert_checkpoint

from ...support.tiny_heads import write_eagle_head


HIDDEN, VOCAB = 32, 96


def write_eagle3(folder: Path) -> None:
    """Reads states that a target of two layers has."""
    path = Path(write_eagle_head(folder, HIDDEN, VOCAB), "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}))


def write_speculators(folder: Path, target) -> None:
    """The layout whose config says most."""
    write_eagle3(folder / "source")
    EagleDrafter.from_folder(str(folder / "source"), target).save_pretrained(folder, "speculators")


def write_medusa(folder: Path, layout: str = "fasterdecoding", token_ids=None) -> None:
    rows = VOCAB if token_ids is None else len(token_ids)
    heads = MedusaHeads(torch.randn(2, 1, HIDDEN, HIDDEN) / 8, None, torch.randn(2, rows, HIDDEN), token_ids)
    write_heads(folder, heads, layout, vocab_size=VOCAB)


def weights_of(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pt"))


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    path = weights_of(folder)
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def write_weights(folder: Path, tensors: dict[str, torch.Tensor], as_pickle: bool = False) -> None:
    path = weights_of(folder)
    if path.suffix == ".safetensors" and as_pickle:
        path.unlink()
        path = folder / "pytorch_model.bin"
    save_file(tensors, path) if path.suffix == ".safetensors" else torch.save(tensors, path)


# --- anything, at random ---------------------------------------------------------------------------------------------

VALUES = (
    *(None, 0, -1, 1, 2, 3, 7, 10**9, 2**63, 10**39, 1e308, -1e308, float("nan"), float("inf"), 0.5, True, False),
    *("", "x", "../../etc", "1e9", "llama", "eagle3", "gelu", "relu2", [], [0], [-1], [10**9], ["x"], [None], [[1]]),
    *({}, {"a": 1}, {"type": "x"}, {"full_attention": 5}, {"rope_type": "llama3"}, {"rope_type": ["yarn"]}),
    *({"rope_type": kind, "factor": factor} for kind in ("linear", "dynamic", "yarn") for factor in (0, 2.0, "x")),
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 3, "factor": 2.0},
)
KEYS = (
    *("rope_scaling", "rope_parameters", "rope_theta", "layer_types", "sliding_window", "eagle_config", "vocab_size"),
    *("eagle_aux_hidden_state_layer_ids", "target_layer_ids", "speculators_model_type", "transformer_layer_config"),
    *("target_hidden_size", "norm_output", "norm_before_residual", "embed_requires_grad", "architectures"),
    *("model_type", "hidden_act", "rms_norm_eps", "num_attention_heads", "original_lm_head", "max_position_embeddings"),
)
DTYPES = (torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float64, torch.float16)
NAMES = ("layers.1000000000.mlp.gate_proj.weight", "layers.x.weight", "99999999.0.linear.weight", "0.7.linear.weight")


def change_config(folder: Path, choose: random.Random) -> None:
    config = json.loads((folder / "config.json").read_text())
    for _ in range(choose.choice((1, 1, 2))):
        inner = config.get("transformer_layer_config")
        place = inner if isinstance(inner, dict) and choose.random() < 0.5 else config
        place[choose.choice([*KEYS, *place])] = choose.choice(VALUES)
    (folder / "config.json").write_text(json.dumps(config))


def change_tensors(folder: Path, choose: random.Random) -> None:
    tensors = read_weights(folder)
    name = choose.choice(list(tensors))
    value = tensors[name]
    kind = choose.choice(("type", "scalar", "flat", "cut", "gone", "name", "empty", "view", "sparse", "meta"))
    if kind == "gone":
        del tensors[name]
    elif kind == "name":
        tensors[choose.choice(NAMES)] = torch.zeros(choose.choice(((4, 4), (1,), ())))
    else:
        tensors[name] = {
            "type": lambda: value.to(choose.choice(DTYPES)),
            "scalar": lambda: value.flatten()[0].clone(),
            "flat": lambda: value.flatten()[:10].clone(),
            "cut": lambda: value[: len(value) // 2].clone(),
            "empty": lambda: value.new_empty(0, *value.shape[1:]),
            "view": lambda: torch.zeros(1).expand(10**5, 10**5),
            "sparse": lambda: value.float().to_sparse(),
            "meta": lambda: value.to("meta"),
        }[kind]()
    write_weights(folder, tensors, as_pickle=kind in ("view", "sparse", "meta"))


def change_bytes(folder: Path, choose: random.Random) -> None:
    path = choose.choice((weights_of(folder), folder / "config.json"))
    data = bytearray(path.read_bytes())
    for _ in range(choose.choice((1, 4))):
        data[choose.randrange(min(len(data), 3000))] = choose.randrange(256)
    path.write_bytes(data if choose.random() < 0.8 else data[: choose.randrange(len(data))])


def run_cases(folder: Path, target, seeds) -> tuple[int, float]:
    """How many loaded, and the seconds of the slowest; anything else than a clear error is raised."""
    prompt, (num_loaded, slowest) = torch.tensor([[5, 6, 7]]), (0, 0.0)
    plain = target.generate(prompt, max_new_tokens=8, do_sample=False)
    writers = (write_eagle3, lambda folder: write_speculators(folder, target), write_medusa)
    for seed in seeds:
        choose, head = random.Random(seed), folder / str(seed)
        choose.choice((*writers, lambda folder: write_medusa(folder, "vllm")))(head)
        choose.choice((change_config, change_config, change_tensors, change_bytes))(head, choose)
        start = time.perf_counter()
        try:
            speculator = AutoSpeculator.from_pretrained(head, target=target)
        except SpeculateError:
            continue
        finally:
            slowest = max(slowest, time.perf_counter() - start)
        drafted = target.generate(prompt, max_new_tokens=8, do_sample=False, speculator=speculator)
        assert torch.equal(drafted, plain), seed
        num_loaded += 1
    return num_loaded, slowest


def test_mutated_heads_give_clear_errors_or_the_targets_text(tmp_path, tiny_model):
    num_loaded, _ = run_cases(tmp_path, tiny_model(), range(60))
    assert 5 < num_loaded < 45


@pytest.mark.slow
def test_many_mutated_heads_give_clear_errors_or_the_targets_text(tmp_path, tiny_model):
    num_loaded, slowest = run_cases(tmp_path, tiny_model(), range(1000, 1500))
    assert 50 < num_loaded < 350
    print(f"{num_loaded} loaded; slowest {slowest:.2f} s")  # noqa: T201


# --- one by one ------------------------------------------------------------------------------------------------------


@pytest.fixture
def refused(tmp_path, tiny_model):
    """Checks that a head is refused with a message."""

    def _refused(message: str, folder: Path | None = None) -> None:
        with pytest.raises(CheckpointError, match=message):
            AutoSpeculator.from_pretrained(folder or tmp_path / "head", target=tiny_model())

    return _refused


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers.1000000000.mlp.gate_proj.weight", "layer 1000000000 is named; there can be 64"),
        ("layers." + "9" * 5000 + ".mlp.gate_proj.weight", "a number of 5000 digits is named"),
        ("layers.64.mlp.gate_proj.weight", "layer 64 is named; there can be 64"),
        ("layers.x.mlp.gate_proj.weight", "unknown: layers.x.mlp"),
        ("layers.63.mlp.gate_proj.weight", r"missing: layers\.1\..*more"),
    ],
    ids=range(5),
)
def test_a_layer_beyond_any_head_is_refused_before_layers_are_made(name, message, tmp_path, refused):
    write_eagle3(tmp_path / "head")
    tensors = read_weights(tmp_path / "head")
    write_weights(tmp_path / "head", tensors | {name: torch.zeros(1)})
    refused(message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("999999999.0.linear.weight", "Medusa head 999999999 is named; there can be 5"),
        ("0.99999999.linear.weight", "block 99999999 is named; there can be"),
    ],
)
def test_a_medusa_head_beyond_the_tensors_is_refused(name, message, tmp_path, refused):
    write_medusa(tmp_path / "head")
    tensors = {key: value for key, value in read_weights(tmp_path / "head").items() if not key.endswith("bias")}
    write_weights(tmp_path / "head", tensors | {name: torch.zeros(HIDDEN, HIDDEN)})
    refused(message)


def test_views_of_more_than_is_stored_are_refused(tmp_path, refused):
    write_medusa(tmp_path / "head")
    tensors = read_weights(tmp_path / "head")
    name = next(iter(tensors))
    write_weights(tmp_path / "head", tensors | {name: torch.zeros(1).expand(10**5, 10**5)}, as_pickle=True)
    assert weights_of(tmp_path / "head").stat().st_size < 10**6
    refused("shows .* bytes of weights, but stores")
    write_weights(tmp_path / "head", tensors | {name: torch.zeros(1).expand(4, 4)}, as_pickle=True)
    refused("repeats the 4 bytes that are stored")


def test_heads_that_share_a_storage_are_read(tmp_path, tiny_model):
    write_medusa(tmp_path / "head")
    tensors = read_weights(tmp_path / "head")
    write_weights(tmp_path / "head", tensors | {"1.1.weight": tensors["0.1.weight"]})
    AutoSpeculator.from_pretrained(tmp_path / "head", target=tiny_model(seed=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.to(torch.complex64), "type complex64; weights may be float64"),
        (lambda t: t.to(torch.float8_e4m3fn), "type float8_e4m3fn; weights may be"),
        (lambda t: t.to(torch.int8), "is of torch.int8, expected torch.float64 or"),
        (lambda t: t.to_sparse(), "sparse_coo tensor"),
        (lambda t: t.to("meta"), "is a meta tensor"),
        (lambda t: t.new_empty(0, 4), "holds nothing"),
        (lambda t: t.flatten()[:10].clone(), "shape"),
        (lambda t: t[0, 0].clone(), "shape"),
    ],
    ids=["complex", "float8", "int8", "sparse", "meta", "empty", "1-D", "0-D"],
)
def test_tensors_that_are_no_weights_are_refused(change, message, tmp_path, refused):
    write_eagle3(tmp_path / "head")
    tensors = read_weights(tmp_path / "head")
    write_weights(tmp_path / "head", tensors | {"fc.weight": change(tensors["fc.weight"])}, as_pickle=True)
    refused(message)


def test_files_of_weights_in_the_old_format_are_read(tmp_path, tiny_model):
    write_medusa(tmp_path / "head")
    tensors = read_weights(tmp_path / "head")
    torch.save(tensors, tmp_path / "head" / "medusa_lm_head.pt", _use_new_zipfile_serialization=False)
    AutoSpeculator.from_pretrained(tmp_path / "head", target=tiny_model())


def test_a_compressed_pickle_is_refused(tmp_path, refused):
    import zipfile

    write_medusa(tmp_path / "head")
    with zipfile.ZipFile(weights_of(tmp_path / "head"), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02X\x00\x00\x01\x00" + b"0" * (1 << 20))
    refused("unpacked it is larger than the file")


@pytest.mark.parametrize(
    "weight_map",
    [
        *(["a"], {"a": 5}, {"a": {"b": 1}}, {"a": None, "b": "x"}, {"a": "../model.safetensors"}, {"a": "/x.bin"}, {}),
        *(None, {"a": "a\0b.bin"}, {"a": ".."}, {"a": "model.safetensors.index.json"}, {"a": "absent.safetensors"}),
    ],
    ids=range(12),
)
def test_an_index_of_anything_but_names_is_refused(weight_map, tmp_path, refused):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused("weight_map is|names the file", tmp_path)


@pytest.mark.parametrize("architectures", [[5], 5, {"a": 1}])
def test_architectures_that_are_no_names_are_refused(architectures, tmp_path, refused):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": architectures}))
    refused("architectures in config.json is", tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tuning.json"])
def test_pipes_are_refused_and_not_waited_for(file, tmp_path, tiny_model):
    write_eagle3(tmp_path / "head")
    (tmp_path / "head" / file).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "head" / file)
    if file == "tuning.json":  # no file, no tuning
        AutoSpeculator.from_pretrained(tmp_path / "head", target=tiny_model())
        return
    with pytest.raises(CheckpointError, match="not a regular file"):
        AutoSpeculator.from_pretrained(tmp_path / "head", target=tiny_model())


def test_a_provenance_that_is_nested_without_end_says_nothing(tmp_path, tiny_model):
    write_eagle3(tmp_path / "head")
    (tmp_path / "head" / "provenance.json").write_text("[" * 100000 + "]" * 100000)
    AutoSpeculator.from_pretrained(tmp_path / "head", target=tiny_model())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": "4"}, "num_attention_heads in config.json is '4', expected an integer"),
        ({"num_attention_heads": 32}, "32 heads of 1 values"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps in config.json is nan"),
        ({"hidden_act": "x"}, "makes no EAGLE head .*'x'"),
        ({"hidden_act": 5}, "hidden_act in config.json is 5, expected a string"),
        ({"rope_scaling": {"rope_type": "x"}}, "makes no EAGLE head"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, "makes no EAGLE head"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "makes no EAGLE head"),
        ({"rope_parameters": 5}, "rope_parameters in config.json is 5, expected an object"),
        ({"layer_types": 5}, "layer_types in config.json is 5, expected a list"),
        ({"layer_types": ["sliding_attention"], "sliding_window": "x"}, "sliding_window in config.json is 'x'"),
        ({"eagle_aux_hidden_state_layer_ids": [1, "x", 2]}, "expected a list of integers"),
        ({"norm_output": "maybe", "dtype": "float32"}, "norm_output in config.json is 'maybe'"),
        ({"target_hidden_size": 10**9}, "target_hidden_size in config.json is 1000000000"),
    ],
    ids=range(14),
)
def test_configs_that_make_no_head_say_which_value_is_wrong(changes, message, tmp_path, refused):
    write_eagle3(tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refused(message)


@pytest.mark.parametrize("token_ids", [[5, 5, 7], [-1, 2, 3], [1, 2, 300], [1.0, 2.0, 3.0]])
def test_token_maps_that_name_no_rows_are_refused(token_ids, tmp_path, refused):
    """Also beside full output matrices, whose rows they choose."""
    write_medusa(tmp_path / "head", "vllm")
    tensors = read_weights(tmp_path / "head")
    write_weights(tmp_path / "head", tensors | {"token_map": torch.tensor(token_ids)})
    refused("token_map")


def test_a_vocabulary_of_any_size_costs_no_memory(tmp_path):
    """Where no target says how large it is."""
    write_eagle3(tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 10**12}))
    with pytest.raises(CheckpointError, match=r"vocab_size in config\.json is 1000000000000"):
        convert_checkpoint(tmp_path / "head", tmp_path / "new", "specforge")


def test_layers_of_draft_models_are_counted_in_their_files(tmp_path, tiny_model, refused):
    tiny_model().save_pretrained(tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    for changes in ({"num_hidden_layers": 10**7}, {"vocab_size": 10**9}, {"intermediate_size": 10**10}):
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | changes))
        refused(f"{next(iter(changes))} in config.json")
        path.write_text(json.dumps(config))
    AutoSpeculator.from_pretrained(tmp_path / "head", target=tiny_model(num_layers=3))
