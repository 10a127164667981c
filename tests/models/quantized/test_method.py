"""Methods of quantization that are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eventlm.errors import CheckpointError
from eventlm.models.quantized.method import METHODS, OLD_FILE, read_method, read_old_method

PATH = Path("/models/x/config.json")
FIELDS = {"bits": 4, "group_size": 128, "desc_act": True}


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


def write_old(folder: Path, **values: Any) -> Path:
    """What AutoGPTQ wrote in 2023."""
    fields = FIELDS | {"damp_percent": 0.01, "sym": True, "true_sequential": True, "model_file_base_name": None}
    (folder / OLD_FILE).write_text(json.dumps(fields | values))
    return folder


def test_old_checkpoints_have_a_file_of_their_own(tmp_path: Path) -> None:
    assert read_old_method(tmp_path) is None
    method = read_old_method(write_old(tmp_path))
    assert method is not None
    wanted = read_method({"quantization_config": FIELDS | {"quant_method": "gptq"}}, PATH)
    assert wanted is not None
    assert (method.name, method.scheme, method.source) == ("gptq", wanted.scheme, OLD_FILE)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bits": 3}, "bits: Invalid enum value 3"),
        ({"group_size": "x"}, "group_size: Expected `int`, got `str`"),
        ({"is_marlin_format": True}, "checkpoint_format: marlin is not supported (supported: gptq, gptq_v2)"),
        ({"dynamic": {"x": {"bits": 2}}}, "dynamic.x.bits: Invalid enum value 2"),
        ({"dynamic": {"(": {}}}, "dynamic: ( is not a regular expression"),
        ({"quant_method": "hqq"}, "quant_method: 'hqq' is not supported there (supported: gptq)"),
    ],
)
def test_old_files_are_refused_alike(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_old_method(write_old(tmp_path, **values))
    assert str(caught.value).startswith(f"{tmp_path / OLD_FILE}: {message}")
