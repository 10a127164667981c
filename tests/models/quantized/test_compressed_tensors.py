"""What configs of compressed-tensors say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventlm.errors import CheckpointError
from eventlm.models.quantized.compressed_tensors import compressed_tensors
from eventlm.models.quantized.scheme import Scheme
from tests.models.quantized.checkpoints import MIXED, compressed

PATH = Path("/x/config.json")
INTEGERS = {"num_bits": 4, "group_size": 128}


def test_names_come_before_expressions_and_these_before_classes() -> None:
    method = compressed_tensors(MIXED, PATH, "key")
    four, eight = Scheme(layout="packed", bits=4, group=(1, 32)), Scheme(layout="bytes", group=(1, 0))
    float8 = Scheme(layout="fp8", group=(1, 0))
    for module, scheme in {
        "lm_head": None,
        "model.layers.0.self_attn.k_proj": None,
        "model.layers.1.self_attn.q_proj": None,
        "model.layers.11.self_attn.q_proj": four,
        "model.layers.0.mlp.down_proj": float8,
        "model.layers.1.mlp.down_proj": eight,
    }.items():
        assert method.scheme_of([module]) == scheme, module


def test_only_what_has_a_group_is_quantized() -> None:
    config = compressed("pack-quantized", INTEGERS)
    config["config_groups"]["group_0"]["targets"] = [r"re:.*mlp\..*"]
    method = compressed_tensors(config, PATH, "key")
    assert method.scheme_of(["model.layers.0.self_attn.q_proj"]) is None
    assert method.scheme_of(["model.layers.0.mlp.up_proj"]) == Scheme(layout="packed", bits=4, group=(1, 128))
    activations = compressed("dense", INTEGERS) | {"format": "dense"}
    assert compressed_tensors(activations, PATH, "key").scheme is None


@pytest.mark.parametrize(
    ("format_", "weights", "message"),
    [
        ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group"},
         "key.config_groups.group_0.format: nvfp4-pack-quantized is not supported (supported: pack-quantized, "),
        ("marlin-24", INTEGERS, "key.config_groups.group_0.format: marlin-24 is not supported"),
        ("pack-quantized", {"num_bits": 3, "group_size": 128},
         "key.config_groups.group_0.weights: int3 by group in pack-quantized is not supported"),
        ("pack-quantized", {"num_bits": 4, "strategy": "tensor"}, "key.config_groups.group_0.weights: int4 by tensor"),
        ("int-quantized", {"num_bits": 8, "strategy": "token"}, "key.config_groups.group_0.weights: int8 by token in"),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block"},
         "key.config_groups.group_0.weights: float8 by block in float-quantized is not supported"),
        ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 16},
         "key.config_groups.group_0.weights: float4 by group in mxfp4-pack-quantized is not supported"),
        ("pack-quantized", {"num_bits": "4"}, "key.config_groups.weights.num_bits: Expected `int`, got `str`"),
    ],
)  # fmt: skip
def test_schemes_that_are_refused(format_: str, weights: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        compressed_tensors(compressed(format_, weights), PATH, "key")
    assert str(caught.value).startswith(f"{PATH}: {message}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "key.sparsity_config: sparse-24-bitmask is not supp"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "key.transform_config: rotations are not supported"),
        ({"config_groups": None}, "key.config_groups: Expected `object`, got `null`"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        compressed_tensors(compressed("pack-quantized", INTEGERS) | changes, PATH, "key")
    assert str(caught.value).startswith(f"{PATH}: {message}")
