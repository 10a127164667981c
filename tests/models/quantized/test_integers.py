"""What GPTQ's and AWQ's configs say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventlm.errors import CheckpointError
from eventlm.models.quantized.integers import awq, gptq
from eventlm.models.quantized.scheme import Scheme

PATH = Path("/x/config.json")
FIELDS: dict[str, Any] = {"bits": 4, "group_size": 128}


def test_gptq() -> None:
    method = gptq(FIELDS | {"sym": False, "damp_percent": 0.1}, PATH, "key")
    assert method.scheme == Scheme(layout="gptq", bits=4, group=(1, 128), has_zeros=True, zero_shift=1)
    second = gptq(FIELDS | {"checkpoint_format": "gptq_v2", "desc_act": True}, PATH, "key").scheme
    assert second == Scheme(layout="gptq", bits=4, group=(1, 128), has_zeros=True, has_order=True)
    # One group has no order.
    assert not gptq({"bits": 8, "group_size": -1, "desc_act": True}, PATH, "key").scheme.has_order


def test_modules_with_settings_of_their_own() -> None:
    dynamic = {"+:.*down_proj": {"bits": 8}, "-:.*k_proj": {}, ".*v_proj": {"group_size": 32}}
    method = gptq(FIELDS | {"dynamic": dynamic}, PATH, "key")
    found = [method.scheme_of([f"layers.0.{name}_proj"]) for name in ("down", "k", "v", "q")]
    assert [scheme and (scheme.bits, scheme.group) for scheme in found] == [
        (8, (1, 128)),
        None,
        (4, (1, 32)),
        (4, (1, 128)),
    ]


def test_awq() -> None:
    method = awq(FIELDS | {"version": "GEMM", "modules_to_not_convert": ["k_proj"]}, PATH, "key")
    assert method.scheme == Scheme(layout="awq", bits=4, group=(1, 128), has_zeros=True)
    assert method.scheme_of(["layers.0.k_proj"]) is None


@pytest.mark.parametrize(
    ("read", "fields", "message"),
    [
        (gptq, {"bits": 3}, "key.bits: Invalid enum value 3"),
        (gptq, {"bits": None}, "key.bits: Expected `int`"),
        (gptq, {"group_size": "128"}, "key.group_size: Expected `int`, got `str`"),
        (gptq, {"group_size": -2}, "key.group_size: Expected `int` >= -1"),
        (gptq, {"checkpoint_format": "marlin"}, "key.checkpoint_format: marlin is not supported (supported: gptq, "),
        (gptq, {"is_marlin_format": True}, "key.checkpoint_format: marlin is not supported"),
        (gptq, {"dynamic": {"x": {"bits": 2}}}, "key.dynamic.x.bits: Invalid enum value 2"),
        (awq, {"bits": 8}, "key.bits: Invalid enum value 8"),
        (awq, {"version": "gemv"}, "key.version: gemv is not supported (supported: gemm)"),
    ],
)  # fmt: skip
def test_what_is_refused(read: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(FIELDS | fields, PATH, "key")
    assert str(caught.value).startswith(f"{PATH}: {message}")
