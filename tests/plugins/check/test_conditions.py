"""`check` names what lowers acceptance besides conventions, and only where the difference is clear over prompts."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest
import torch

from hf_speculate_tools.check import has_other_template, other_forms
from hf_speculate_tools.check.conditions import Measured, compare, compare_positions
from hf_speculate_tools.commands import Prompt, chat_ids


PROMPTS = [Prompt("chat", text) for text in ("a", "bc", "def")]


def measured(*accepted, name="as it is used"):
    """Every prompt with the same number of accepted tokens in each of its chains."""
    return Measured(name, tuple(torch.full((20,), value) for value in accepted), (10,) * len(accepted), 5)


def compared(now, other, **options):
    return compare("chat template", now, other, "is lower now", **options)


class TestCompare:
    def test_only_a_lower_acceptance_is_named(self):
        now, other = measured(1, 2, 3, 2), measured(2, 3, 4, 3, name="without it")
        found = compared(now, other)
        assert (found.kind, found.gain) == ("chat template", 1.0)
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

    def test_compare_ignores_small_or_rare_differences(self):
        assert compared(measured(1, 2, 3), measured(2, 3, 4)) is None
        now, other = ([torch.tensor([2] * 9 + [value])] * 8 for value in (2, 3))
        assert compared(Measured("a", tuple(now), (9,) * 8, 5), Measured("b", tuple(other), (9,) * 8, 5)) is None

    def test_prompts_after_which_too_little_was_written_do_not_count(self):
        now = Measured("a", (*measured(1, 2, 3, 2).accepted, torch.zeros(0, dtype=torch.long)), (10,) * 5, 5)
        assert compared(now, measured(2, 3, 4, 3, 5)).gain == 1.0
        assert compared(now, measured(2, 3, 4, 3, 5)).sigmas == pytest.approx(20)


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


class TestForms:
    def test_prompts_are_formed_as_they_may_have_been_in_training(self):
        tokenizer = Switching()
        plain = [tokenizer(prompt.content).input_ids[0] for prompt in PROMPTS]
        chats = [chat_ids(prompt.messages, tokenizer) for prompt in PROMPTS]
        forms = other_forms(PROMPTS, chats, tokenizer, uses_template=True)
        assert list(forms) == ["without the chat template", "with enable_thinking=True"]
        assert all(map(torch.equal, forms["without the chat template"], plain))
        forms = other_forms(PROMPTS, plain, tokenizer, uses_template=False)
        assert list(forms) == ["with the chat template"]
        assert all(map(torch.equal, forms["with the chat template"], chats))

    def test_without_a_template_there_is_one_form(self):
        tokenizer = Switching()
        tokenizer.chat_template = None
        assert other_forms(PROMPTS, [], tokenizer, uses_template=False) == {}

    def test_the_heads_own_template_is_compared_and_not_run(self, tmp_path):
        provenance = tmp_path / "provenance.json"
        for template, is_other in ((Switching.chat_template, False), ("{{ 1 / 0 }}", True), (None, False)):
            provenance.write_text(json.dumps({"chat_template": template}))
            assert has_other_template(str(tmp_path), Switching()) == is_other


class TestContext:
    @pytest.mark.parametrize(
        ("name", "content", "what"),
        [
            ("provenance.json", {"recipe": {"data": {"max_length": 20}}}, "the length that it was trained with"),
            ("config.json", {"max_position_embeddings": 20}, "the head's max_position_embeddings"),
        ],
    )
    def test_a_lower_acceptance_beyond_a_limit_is_named(self, tmp_path, name, content, what):
        (tmp_path / name).write_text(json.dumps(content))
        falling, even = (Measured("", (torch.tensor([3] * 10 + [after] * 10),) * 6, (10,) * 6, 5) for after in (1, 3))
        finding = compare_positions(falling, str(tmp_path))
        assert (finding.kind, {rates.num_positions for rates in finding.acceptance.values()}) == ("context", {60})
        figures = "2.00 tokens per round from position 20 on, 4.00 before position 20 (2.00 apart, 35 sigma)"
        assert finding.message == f"{figures}: 20 is {what}."
        assert compare_positions(even, str(tmp_path)) is None

    @pytest.mark.parametrize("value", [[1], {}, -5, 10**30, True, "x"])
    def test_compare_positions_ignores_invalid_lengths(self, tmp_path, value):
        (tmp_path / "provenance.json").write_text(json.dumps({"recipe": {"data": {"max_length": value}}}))
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": value}))
        assert compare_positions(measured(1, 2, 3, 2), str(tmp_path)) is None
