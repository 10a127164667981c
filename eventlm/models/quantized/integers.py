"""What config.json says of checkpoints that GPTQ or AWQ made. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint.json_files import convert_object
from eventlm.models.quantized.scheme import Method, Rule, Scheme, not_converted

#: -1: all inputs.
GroupSize = Annotated[int, Meta(ge=-1, le=1 << 20)]
_VERSIONS = ("gptq", "gptq_v2")
_EXCEPT = "-:"


class _Gptq(Struct, frozen=True, kw_only=True):
    bits: Literal[4, 8]
    group_size: GroupSize
    desc_act: bool = False
    checkpoint_format: str | None = None
    format: str | None = None
    is_marlin_format: bool = False
    dynamic: dict[str, dict[str, Any]] | None = None


class _Awq(Struct, frozen=True, kw_only=True):
    bits: Literal[4]
    group_size: GroupSize
    version: str | None = None
    format: str | None = None
    modules_to_not_convert: list[str] | None = None


def gptq(values: dict[str, Any], path: Path, key: str) -> Method:
    """GPTQ (Frantar et al., 2022) as AutoGPTQ and GPTQModel write it: 4 or 8 bits.

    The first version of the format stores zeros less one. `dynamic` names modules with other settings (`+:`) or with
    none (`-:`).
    """
    fields = convert_object(values, _Gptq, path, inside=key)
    version = "marlin" if fields.is_marlin_format else fields.checkpoint_format or fields.format or _VERSIONS[0]
    _check_format(path, _inside(key, "checkpoint_format"), version, _VERSIONS)
    rules = []
    for pattern, changes in (fields.dynamic or {}).items():
        name = pattern.removeprefix(_EXCEPT).removeprefix("+:")
        changed = convert_object(
            structs.asdict(fields) | changes, _Gptq, path, inside=_inside(key, f"dynamic.{pattern}")
        )
        rules.append(Rule(name, None if pattern.startswith(_EXCEPT) else _of_gptq(changed, version)))
    return Method(name="gptq", scheme=_of_gptq(fields, version), rules=tuple(rules))


def awq(values: dict[str, Any], path: Path, key: str) -> Method:
    """AWQ (Lin et al., 2023) as AutoAWQ writes it for its `gemm` product."""
    fields = convert_object(values, _Awq, path, inside=key)
    _check_format(path, _inside(key, "version"), (fields.version or fields.format or "gemm").lower(), ("gemm",))
    scheme = Scheme(layout="awq", bits=4, group=_group(fields.group_size), has_zeros=True)
    return Method(name="awq", scheme=scheme, rules=not_converted(fields.modules_to_not_convert or ()))


def _of_gptq(fields: _Gptq, version: str) -> Scheme:
    return Scheme(
        layout="gptq",
        bits=fields.bits,
        group=_group(fields.group_size),
        has_zeros=True,
        # In one group there is no order.
        has_order=fields.desc_act and fields.group_size > 0,
        zero_shift=1 if version == _VERSIONS[0] else 0,
    )


def _group(size: int) -> tuple[int, int]:
    return 1, max(size, 0)


def _inside(key: str, field: str) -> str:
    """The name of a field of what lies under a key; with an empty one, of the whole file."""
    return f"{key}.{field}" if key else field


def _check_format(path: Path, key: str, found: str, supported: tuple[str, ...]) -> None:
    if found not in supported:
        raise CheckpointError(
            f"{path}: {key}: {found} is not supported (supported: {', '.join(supported)}); take another checkpoint of "
            "the model"
        )
