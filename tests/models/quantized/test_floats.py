"""What the configs of floats of 8 and 4 bits say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventlm.errors import CheckpointError
from eventlm.models.quantized.floats import fbgemm_fp8, fp8, mxfp4
from eventlm.models.quantized.scheme import Scheme

PATH = Path("/x/config.json")


def test_floats_of_8_bits() -> None:
    assert fp8({"weight_block_size": [128, 64]}, PATH, "key").scheme == Scheme(
        layout="fp8", group=(128, 64), is_exact=True
    )
    assert fp8({"weight_block_size": None}, PATH, "key").scheme == Scheme(layout="fp8", group=(0, 0), is_exact=True)
    assert fbgemm_fp8({}, PATH, "key").scheme == Scheme(layout="fp8", group=(1, 0), is_exact=True)
    for name in ("ignored_layers", "modules_to_not_convert"):
        assert fp8({name: ["lm_head"]}, PATH, "key").scheme_of(["lm_head"]) is None
    assert fbgemm_fp8({"modules_to_not_convert": ["lm_head"]}, PATH, "key").scheme_of(["lm_head"]) is None


def test_floats_of_4_bits() -> None:
    ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    method = mxfp4({"modules_to_not_convert": ignored}, PATH, "key")
    assert method.scheme_of(["model.layers.11.self_attn.q_proj"]) is None
    assert method.scheme_of(["model.layers.11.mlp.router"]) is None
    assert method.scheme_of(["model.layers.11.mlp.experts.gate_up_proj"]) == Scheme(
        layout="fp4", bits=4, group=(1, 32), is_exact=True
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fmt": "e5m2"}, "key.fmt: Invalid enum value 'e5m2'"),
        ({"weight_block_size": [128]}, "key.weight_block_size: Expected `array` of length 2"),
        ({"weight_block_size": [0, 128]}, "key.weight_block_size[0]: Expected `int` >= 1"),
        ({"expert_dtype": "fp4"}, "key.expert_dtype: Invalid enum value 'fp4'"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        fp8(fields, PATH, "key")
    assert str(caught.value).startswith(f"{PATH}: {message}")
