"""`check` names what lowers acceptance beside conventions, and only where the difference is clear over prompts."""

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

from hf_speculate.errors import SpeculateError
from hf_speculate_tools import cli
from hf_speculate_tools.check import HeadInUse, find_conditions
from hf_speculate_tools.check.conditions import Measured, compare
from hf_speculate_tools.commands import Prompt, chat_ids

from ...support.adapters import perturbed
from ...support.models import build_tiny_model
from ...support.paths import REPOSITORY


PYTHON = REPOSITORY / "plugins" / "hf_speculate_tools" / "commands" / "python_prompts.jsonl"
EXAMPLES = REPOSITORY / "examples"


def measured(*accepted, name="as it is used"):
    """Every prompt with the same number of accepted tokens in each of its chains."""
    return Measured(name, tuple(torch.full((20,), value) for value in accepted), (10,) * len(accepted), 5)


def compared(now, other, **options):
    return compare("adapter", now, other, "is lower now", **options)


class TestCompare:
    def test_only_a_lower_acceptance_is_named(self):
        now, other = measured(1, 2, 3, 2), measured(2, 3, 4, 3, name="without it")
        found = compared(now, other)
        assert (found.kind, found.gain) == ("adapter", 1.0)
        assert found.sigmas == pytest.approx(20)
        assert found.message == (
            "3.00 tokens per round as it is used, 4.00 without it (1.00 apart, 20 sigma): is lower now"
        )
        assert [rates.mean_length for rates in found.acceptance.values()] == [3.0, 4.0]
        assert compared(other, now) is None

    def test_prompts_are_paired(self):
        """Prompts differ far more than conditions do."""
        assert compared(measured(0, 1, 3, 5), measured(1, 2, 4, 6)) is not None
        assert compared(measured(0, 1, 3, 5), measured(1, 2, 4, 6), paired=False) is None
        assert compared(measured(0, 1, 3, 5), measured(6, 4, 2, 1)) is None

    def test_what_is_small_or_seen_on_few_prompts_is_not_named(self):
        assert compared(measured(1, 2, 3), measured(2, 3, 4)) is None
        now, other = ([torch.tensor([2] * 9 + [value])] * 8 for value in (2, 3))
        assert compared(Measured("a", tuple(now), (9,) * 8, 5), Measured("b", tuple(other), (9,) * 8, 5)) is None

    def test_prompts_after_which_too_little_was_written_do_not_count(self):
        now = Measured("a", (*measured(1, 2, 3, 2).accepted, torch.zeros(0, dtype=torch.long)), (10,) * 5, 5)
        assert compared(now, measured(2, 3, 4, 3, 5)).gain == 1.0
        assert compared(now, measured(2, 3, 4, 3, 5)).sigmas == pytest.approx(20)


@dataclass(frozen=True, kw_only=True)
class Scripted(HeadInUse):
    """Accepted tokens by the condition's name, the same for every chain of a prompt."""

    accepted: dict[str, int | tuple[int, ...]]
    seen: list[str] = field(default_factory=list)

    def measure(self, name, ids, target=None):
        self.seen.append(name)
        values = self.accepted.get(name, 2)
        return measured(*([values] * len(ids) if isinstance(values, int) else values), name=name)


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


def scripted(tmp_path, accepted, kind=Scripted, **changes):
    tokenizer = Switching()
    prompts = [Prompt("chat", text) for text in ("a", "bc", "def", "ghij", "klmno", "p")]
    given = {
        "folder": str(tmp_path),
        "depth": 5,
        "max_new_tokens": 20,
        "target": build_tiny_model(),
        "tokenizer": tokenizer,
        "prompts": prompts,
        "ids": [tokenizer(f"<user>{prompt.content}").input_ids[0] for prompt in prompts],
        "uses_template": True,
        "load_dense": lambda: "dequantised",
        "accepted": accepted,
    }
    return kind(**given | changes)


def found(tmp_path, accepted, **changes):
    use = scripted(tmp_path, accepted, **changes)
    return {finding.kind: finding.message for finding in find_conditions(use, others=True)}, use.seen


def packed_model():
    packed = copy.deepcopy(build_tiny_model())
    packed.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return packed


class TestConditions:
    def test_nothing_is_named_where_nothing_differs(self, tmp_path):
        findings, seen = found(tmp_path, {})
        assert findings == {}
        assert seen == ["as it is used", "without the chat template", "with enable_thinking=True"]

    def test_template(self, tmp_path, caplog):
        findings, _ = found(tmp_path, {"without the chat template": 4})
        assert list(findings) == ["chat template"]
        assert "3.00 tokens per round with the chat template, 5.00 without" in findings["chat template"]
        findings, seen = found(tmp_path, {"with the chat template": 4}, uses_template=False)
        assert "it was trained on texts with the chat template" in findings["chat template"]
        assert "with enable_thinking=True" not in seen

    def test_the_heads_own_template_is_compared_and_not_run(self, tmp_path, caplog):
        provenance = tmp_path / "provenance.json"
        provenance.write_text(json.dumps({"chat_template": Switching.chat_template}))
        found(tmp_path, {})
        assert not caplog.messages
        provenance.write_text(json.dumps({"chat_template": "{{ 1 / 0 }}"}))
        assert found(tmp_path, {})[0] == {}
        assert caplog.messages == ["the target's chat template is not the one that the head was trained with."]

    def test_thinking(self, tmp_path):
        findings, _ = found(tmp_path, {"with enable_thinking=True": 4})
        assert "trained on answers with enable_thinking=True" in findings["thinking"]

    def test_adapter(self, tmp_path):
        findings, seen = found(tmp_path, {"without it": 3}, without_adapter=nullcontext, target=packed_model())
        assert "was trained for the target without this adapter" in findings["adapter"]
        assert "dequantised" not in seen

    def test_quantisation(self, tmp_path):
        findings, _ = found(tmp_path, {"dequantised": 4}, target=packed_model())
        assert "as bitsandbytes (4 bit), 5.00 dequantised" in findings["quantisation"]

    def test_a_target_that_cannot_be_dequantised_is_left_out(self, tmp_path):
        def refuse():
            raise SpeculateError("too large")

        findings, seen = found(tmp_path, {}, target=packed_model(), load_dense=refuse)
        assert (findings, "dequantised" in seen) == ({}, False)

    @pytest.mark.parametrize(
        ("name", "content", "what"),
        [
            ("provenance.json", {"recipe": {"data": {"max_length": 20}}}, "the length that it was trained with"),
            ("config.json", {"max_position_embeddings": 20}, "the head's max_position_embeddings"),
        ],
    )
    def test_context(self, tmp_path, name, content, what):
        class Long(Scripted):
            def measure(self, name, *_):
                after = self.accepted.get("after", 1)
                return Measured(name, (torch.tensor([3] * 10 + [after] * 10),) * 6, (10,) * 6, 5)

        (tmp_path / name).write_text(json.dumps(content))
        (finding,) = find_conditions(scripted(tmp_path, {}, Long), others=False)
        assert (finding.kind, {rates.num_positions for rates in finding.acceptance.values()}) == ("context", {60})
        figures = "2.00 tokens per round from position 20 on, 4.00 before position 20 (2.00 apart, 35 sigma)"
        assert finding.message == f"{figures}: 20 is {what}."
        assert find_conditions(scripted(tmp_path, {"after": 3}, Long), others=False) == ()

    @pytest.mark.parametrize("value", [[1], {}, -5, 10**30, True, "x"])
    def test_lengths_that_are_none(self, tmp_path, value):
        (tmp_path / "provenance.json").write_text(json.dumps({"recipe": {"data": {"max_length": value}}}))
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": value}))
        assert found(tmp_path, {})[0] == {}


def test_a_chat_template_that_raises_is_one_error():
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "pycoder")
    for template, message in (("{{ 1 / 0 }}", "division by zero"), ("{% for %}", "Expected an expression")):
        tokenizer.chat_template = template
        with pytest.raises(SpeculateError, match=f"the target's chat template refuses this chat: {message}"):
            chat_ids([{"role": "user", "content": "a"}], tokenizer)


class TestCommand:
    def run(self, *arguments):
        given = ["check", EXAMPLES / "pycoder-eagle3", "--target", EXAMPLES / "pycoder", *arguments]
        return CliRunner().invoke(cli.app, [*map(str, given), "--no-alternatives", "--json"])

    def test_an_adapter(self, tmp_path):
        peft = pytest.importorskip("peft")
        model = AutoModelForCausalLM.from_pretrained(EXAMPLES / "pycoder")
        config = peft.LoraConfig(r=4, lora_alpha=80, target_modules=["v_proj", "down_proj"], init_lora_weights=False)
        torch.manual_seed(0)
        perturbed(peft.get_peft_model(model, config)).save_pretrained(tmp_path)
        arguments = ["--prompts", PYTHON, "--limit", 8, "--max-new-tokens", 32, "--adapter", tmp_path, "--conditions"]
        result = self.run(*arguments)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        finding = next(finding for finding in found["findings"] if finding["kind"] == "adapter")
        assert set(finding["acceptance"]) == {"with the adapter", "without it"}
        assert found["verdict"] == "explained"

    def test_an_adapter_that_is_none(self, tmp_path):
        pytest.importorskip("peft")
        result = self.run("--adapter", tmp_path)
        assert result.exit_code == 1
        assert result.stderr.startswith("hf-speculate: error: cannot load the adapter")
