"""The quantisation of a target in words."""

from __future__ import annotations

import copy

import pytest

from hf_speculate.target import quantization_label

from ..support.models import build_tiny_model


@pytest.mark.parametrize(
    ("config", "label"),
    [
        (None, ""),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes (nf4)"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes (int8)"),
        ({"quant_method": "gptq", "bits": 4}, "gptq (4 bit)"),
        ({"quant_method": "fp8"}, "fp8"),
    ],
)
def test_quantization_label_names_method_and_width(config, label):
    model = copy.deepcopy(build_tiny_model())
    model.config.quantization_config = config
    assert quantization_label(model) == label
