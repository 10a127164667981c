"""What config.json says of checkpoints whose weights are floats of 8 or 4 bits. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from eventlm.models.checkpoint.json_files import convert_object
from eventlm.models.quantized.scheme import Method, Scheme, not_converted

_Side = Annotated[int, Meta(ge=1, le=1 << 20)]


class _Fp8(Struct, frozen=True, kw_only=True):
    fmt: Literal["e4m3"] = "e4m3"
    weight_block_size: tuple[_Side, _Side] | None = None
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None
    expert_dtype: Literal["fp8"] = "fp8"


class _NotConverted(Struct, frozen=True, kw_only=True):
    modules_to_not_convert: list[str] | None = None


def fp8(values: dict[str, Any], path: Path, key: str) -> Method:
    """`fp8`: a scale for each block, as DeepSeek-V3 has it, or for each output or matrix."""
    fields = convert_object(values, _Fp8, path, inside=key)
    ignored = fields.modules_to_not_convert or fields.ignored_layers or ()
    scheme = Scheme(layout="fp8", group=fields.weight_block_size or (0, 0), is_exact=True)
    return Method(name="fp8", scheme=scheme, rules=not_converted(ignored))


def fbgemm_fp8(values: dict[str, Any], path: Path, key: str) -> Method:
    """`fbgemm_fp8`: a scale for each output."""
    fields = convert_object(values, _NotConverted, path, inside=key)
    scheme = Scheme(layout="fp8", is_exact=True)
    return Method(name="fbgemm_fp8", scheme=scheme, rules=not_converted(fields.modules_to_not_convert or ()))


def mxfp4(values: dict[str, Any], path: Path, key: str) -> Method:
    """`mxfp4`: the experts of gpt-oss."""
    fields = convert_object(values, _NotConverted, path, inside=key)
    # The names in it are patterns for a shell.
    ignored = [name.replace("*", "[^.]*") for name in fields.modules_to_not_convert or ()]
    scheme = Scheme(layout="fp4", bits=4, group=(1, 32), is_exact=True)
    return Method(name="mxfp4", scheme=scheme, rules=not_converted(ignored))
