"""Methods of quantization that are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventlm.errors import CheckpointError
from eventlm.models.quantized.method import METHODS, read_method

PATH = Path("/models/x/config.json")


def test_without_a_config_nothing_is_quantized() -> None:
    for values in ({}, {"quantization_config": None}, {"quantization_config": {}, "quantization": None}):
        assert read_method(values, PATH) is None


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes in 4 bits"),
        ({"quantization_config": {"load_in_8bit": True}}, "an unknown method in 8 bits"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "aqlm"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "modelopt, NVFP4"),
        ({"quantization_config": {"quant_method": ["gptq"]}}, "['gptq']"),
        ({"quantization_config": "gptq"}, "an unknown method"),
        ({"compression_config": {"format": "marlin-24"}}, "an unknown method"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "MLX in 4 bits"),
    ],
)
def test_other_methods_are_named(values: dict[str, Any], what: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_method(values, PATH)
    message = str(caught.value)
    assert message.startswith(f"{PATH}: its weights are quantized ({next(iter(values))}: {what}), and of such")
    assert all(name in message for name in METHODS)
    assert "\n" not in message


def test_expressions_that_are_none() -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": ["(lm_head"]}
    with pytest.raises(CheckpointError, match=r"quantization_config: .*\(lm_head.* is not a regular expression: "):
        read_method({"quantization_config": config}, PATH)
