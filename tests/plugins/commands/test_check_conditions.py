"""`check` names what lowers acceptance beside conventions: prompts, template, adapter, quantisation, dtype, context."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hf_speculate import cli
from hf_speculate.commands import Prompt, chat_ids
from hf_speculate.errors import SpeculateError
from hf_speculate_plugins.calibration import Measured
from hf_speculate_plugins.commands.conditions import Use, find_conditions
from hf_speculate_plugins.commands.foreign_templates import foreign_chat_ids

from ...support.adapters import perturbed
from ...support.models import build_tiny_model
from ...support.paths import REPOSITORY


PYTHON = REPOSITORY / "hf_speculate" / "commands" / "python_prompts.jsonl"
EXAMPLES = REPOSITORY / "examples"
ENGLISH = (
    "The history of the Roman empire begins with",
    "In the morning she walked down to the sea and",
    "Dear Sir, I am writing to you because",
    "Once upon a time there was a king who",
    "The weather in Scotland is",
    "He opened the door, and in front of him stood",
)


@dataclass
class Scripted:
    """In the place of `HeadMeasure`: accepted tokens by the condition's name, the same for every prompt and chain."""

    folder: str
    accepted: dict[str, int]
    seen: list[str] = field(default_factory=list)

    def of(self, name, target, prompts):
        self.seen.append(name)
        value = self.accepted.get(name, 2)
        return Measured(name, (torch.full((20,), value),) * len(prompts), (10,) * len(prompts), 5)


class Switching:
    """A tokenizer whose template has the switch of thinking models; off unless asked for."""

    chat_template = "{% if enable_thinking %}<think>{% endif %}"
    special_tokens_map: ClassVar = {}

    def apply_chat_template(self, messages, enable_thinking=False, **_):
        return f"<user>{messages[0]['content']}" + ("<think>" if enable_thinking else "")

    def __call__(self, text, **_):
        class Encoded:
            input_ids = torch.tensor([[ord(letter) % 90 for letter in text]])

        return Encoded


def use(tmp_path, target=None, **changes):
    tokenizer = Switching()
    prompts = [Prompt("chat", text) for text in ("a", "bc", "def", "ghij", "klmno", "p")]
    ids = [tokenizer(f"<user>{prompt.content}").input_ids[0] for prompt in prompts]
    given = {"uses_template": True, "load": lambda dtype, dense: "another form", "without_adapter": None} | changes
    return Use(target or build_tiny_model(), tokenizer, prompts, ids, **given)


def found(tmp_path, accepted, **changes):
    measure = Scripted(str(tmp_path), accepted)
    findings = find_conditions(measure, use(tmp_path, **changes), others=True)
    return {finding.kind: finding for finding in findings}, measure.seen


class TestConditions:
    def test_nothing_is_named_where_nothing_differs(self, tmp_path):
        findings, seen = found(tmp_path, {})
        assert findings == {}
        assert seen == ["as it is used", "without the chat template", "with enable_thinking=True"]

    def test_template(self, tmp_path):
        findings, _ = found(tmp_path, {"without the chat template": 4})
        assert list(findings) == ["chat template"]
        assert "3.00 tokens a round with the chat template, 5.00 without" in findings["chat template"].message
        findings, seen = found(tmp_path, {"with the chat template": 4}, uses_template=False)
        assert "it was trained on texts with the chat template" in findings["chat template"].message
        assert "with enable_thinking=True" not in seen

    def test_another_template_than_at_training(self, tmp_path):
        provenance = tmp_path / "provenance.json"
        provenance.write_text(json.dumps({"chat_template": Switching.chat_template}))
        name = "with the one that it was trained with"
        assert name not in found(tmp_path, {name: 4})[1], "it is the same"
        provenance.write_text(json.dumps({"chat_template": "{{ messages }}"}))
        findings, _ = found(tmp_path, {name: 4})
        assert "another one than the head was trained with" in findings["chat template"].message

    def test_thinking(self, tmp_path):
        findings, _ = found(tmp_path, {"with enable_thinking=True": 4})
        assert "trained on answers with enable_thinking=True" in findings["thinking"].message

    def test_adapter(self, tmp_path):
        findings, seen = found(tmp_path, {"without it": 3}, without_adapter=nullcontext)
        assert "was trained for the target without this adapter" in findings["adapter"].message
        assert "in float32" not in seen

    def test_dtype(self, tmp_path):
        narrow = build_tiny_model(dtype=torch.bfloat16)
        findings, seen = found(tmp_path, {"in float32": 3}, target=narrow)
        assert "in bfloat16, 4.00 in float32" in findings["dtype"].message
        assert "dequantised" not in seen

    def test_quantisation(self, tmp_path):
        packed = copy.deepcopy(build_tiny_model())
        packed.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        findings, _ = found(tmp_path, {"dequantised": 4}, target=packed)
        assert "as bitsandbytes (4 bit), 5.00 dequantised" in findings["quantisation"].message

    def test_a_form_that_cannot_be_had_is_left_out(self, tmp_path):
        def refuse(dtype, dense):
            raise SpeculateError("too large")

        findings, seen = found(tmp_path, {}, target=build_tiny_model(dtype=torch.bfloat16), load=refuse)
        assert (findings, "in float32" in seen) == ({}, False)

    @pytest.mark.parametrize(
        ("name", "content", "what"),
        [
            ("provenance.json", {"recipe": {"data": {"max_length": 20}}}, "the length that it was trained with"),
            ("config.json", {"max_position_embeddings": 20}, "the head's max_position_embeddings"),
        ],
    )
    def test_context(self, tmp_path, name, content, what):
        (tmp_path / name).write_text(json.dumps(content))
        measure = Scripted(str(tmp_path), {})
        accepted = torch.tensor([3] * 10 + [1] * 10)
        measure.of = lambda name, *_: Measured(name, (accepted,) * 6, (10,) * 6, 5)
        (finding,) = find_conditions(measure, use(tmp_path), others=False)
        assert finding.kind == "context"
        assert finding.message.endswith(f"20 is {what}.")


class TestCommand:
    def run(self, *arguments):
        given = ["check", EXAMPLES / "pycoder-eagle3", "--target", EXAMPLES / "pycoder", *arguments, "--json"]
        result = CliRunner().invoke(cli.app, [*map(str, given), "--no-alternatives"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def test_two_files_of_prompts(self, tmp_path):
        other = tmp_path / "english.txt"
        other.write_text("\n".join(ENGLISH))
        found = self.run("--prompts", PYTHON, "--prompts", other, "--limit", 12, "--no-conditions")
        (finding,) = found["findings"]
        assert finding["kind"] == "prompts"
        assert finding["gain"] > 0.5
        low, high = (rates["mean_length"] for rates in finding["acceptance"].values())
        assert high - low > 0.5
        assert "on prompts 'english'" in found["message"]

    def test_an_adapter(self, tmp_path):
        peft = pytest.importorskip("peft")
        model = AutoModelForCausalLM.from_pretrained(EXAMPLES / "pycoder")
        config = peft.LoraConfig(r=4, lora_alpha=40, target_modules=["v_proj", "down_proj"], init_lora_weights=False)
        torch.manual_seed(0)
        perturbed(peft.get_peft_model(model, config)).save_pretrained(tmp_path)
        found = self.run(
            "--prompts", PYTHON, "--limit", 8, "--max-new-tokens", 32, "--adapter", tmp_path, "--conditions"
        )
        finding = next(finding for finding in found["findings"] if finding["kind"] == "adapter")
        assert set(finding["acceptance"]) == {"with the adapter", "without it"}
        assert found["verdict"] == "explained"

    def test_an_adapter_that_is_none(self, tmp_path):
        pytest.importorskip("peft")
        arguments = ["check", EXAMPLES / "pycoder-eagle3", "--target", EXAMPLES / "pycoder", "--adapter", tmp_path]
        result = CliRunner().invoke(cli.app, list(map(str, arguments)))
        assert result.exit_code == 1
        assert result.stderr.startswith("hf-speculate: error: cannot load the adapter")


class TestForeignTemplates:
    """What a head brings with it is rendered as transformers would, and can neither hang nor fill the machine."""

    def test_it_is_transformers_own_rendering(self):
        tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "pycoder")
        template = (
            "{{ eos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{{ messages | tojson }}"
        )
        chats = [[{"role": "user", "content": text}] for text in ("a", "\u00e4\n'")]
        tokenizer.chat_template = template
        expected = [chat_ids(chat, tokenizer) for chat in chats]
        found = foreign_chat_ids(chats, tokenizer, template)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 5 seconds"),
            ("{{ 'x' * 3000000000 }}", "MemoryError"),
            ("{% for %}", "Expected an expression"),
            ("{{ raise_exception('no system') }}", "no system"),
            ("{{ 1 / 0 }}", "division by zero"),
            ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "is unsafe"),
        ],
        ids=["loop", "memory", "syntax", "raises", "arithmetic", "attack"],
    )
    def test_what_it_does_is_one_error(self, template, message):
        seconds = 5 if "5 seconds" in message else 200
        with pytest.raises(SpeculateError, match=message):
            foreign_chat_ids([[{"role": "user", "content": "a"}]], Switching(), template, seconds)

    def test_the_targets_own(self):
        tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "pycoder")
        for template, message in (("{{ 1 / 0 }}", "division by zero"), ("{% for %}", "Expected an expression")):
            tokenizer.chat_template = template
            with pytest.raises(SpeculateError, match=f"the target's chat template refuses this chat: {message}"):
                chat_ids([{"role": "user", "content": "a"}], tokenizer)

    @pytest.mark.parametrize("value", [[1], {}, -5, 10**30, True, "x"])
    def test_lengths_that_are_none(self, tmp_path, value):
        (tmp_path / "provenance.json").write_text(json.dumps({"recipe": {"data": {"max_length": value}}}))
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": value}))
        assert found(tmp_path, {})[0] == {}
