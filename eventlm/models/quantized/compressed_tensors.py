"""What config.json says of checkpoints in the format of the library compressed-tensors. Loads no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint.json_files import convert_object
from eventlm.models.quantized.scheme import Method, Rule, Scheme

_EXPRESSION = "re:"
#: The class of all modules with a matrix but embeddings.
_ALL = "Linear"
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized", "dense")
_Size = Annotated[int, Meta(ge=1, le=1 << 20)]


class _Weights(Struct, frozen=True, kw_only=True):
    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: tuple[_Size, _Size] | None = None
    actorder: str | bool | None = None


class _Group(Struct, frozen=True, kw_only=True):
    targets: list[str]
    weights: _Weights | None = None
    format: str | None = None


class _Config(Struct, frozen=True, kw_only=True):
    format: str = "dense"
    config_groups: dict[str, _Group]
    ignore: list[str] | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


def compressed_tensors(values: dict[str, Any], path: Path, key: str) -> Method:
    """Groups of modules with a scheme each. Exact names come before expressions, and these before classes."""
    config = convert_object(values, _Config, path, inside=key)
    sparsity = (config.sparsity_config or {}).get("format", "dense")
    if sparsity != "dense":
        raise CheckpointError(f"{path}: {key}.sparsity_config: {sparsity} is not supported; take a dense checkpoint")
    if any((config.transform_config or {}).values()):
        raise CheckpointError(f"{path}: {key}.transform_config: rotations are not supported; take one without them")
    groups = [
        (group.targets, _scheme(group, group.format or config.format, path, f"{key}.config_groups.{name}"))
        for name, group in config.config_groups.items()
    ]
    rules = [*_rules(config.ignore or (), None, names=True), *_rules(config.ignore or (), None, names=False)]
    for names in (True, False):
        rules += [rule for targets, scheme in groups for rule in _rules(targets, scheme, names=names)]
    default = next((scheme for targets, scheme in groups if _ALL in targets), None)
    return Method(name="compressed-tensors", scheme=default, rules=tuple(rules))


def _rules(targets: Sequence[str], scheme: Scheme | None, *, names: bool) -> list[Rule]:
    """One for all names among the targets, or for all expressions."""
    expressions = [target.removeprefix(_EXPRESSION) for target in targets if target.startswith(_EXPRESSION)]
    exact = [re.escape(target) + "$" for target in targets if not target.startswith(_EXPRESSION) and target != _ALL]
    wanted = exact if names else expressions
    return [Rule("|".join(f"(?:{each})" for each in wanted), scheme)] if wanted else []


def _scheme(group: _Group, name: str, path: Path, where: str) -> Scheme | None:
    """None where only activations are quantized. Raises CheckpointError for what is not supported."""
    weights = group.weights
    if name not in (*_FORMATS, "mixed-precision"):
        raise CheckpointError(f"{path}: {where}.format: {name} is not supported (supported: {', '.join(_FORMATS)})")
    if weights is None or name == "dense":
        return None
    what, by = f"{weights.type}{weights.num_bits}", weights.strategy or ("group" if weights.group_size else "tensor")
    groups = {
        "tensor": (0, 0),
        "channel": (1, 0),
        "group": (1, max(weights.group_size or 0, 0)),
        "block": weights.block_structure,
    }
    group_of = groups.get(by) or (-1, -1)
    has_zeros, has_order = not weights.symmetric, weights.actorder in ("group", "dynamic", True)
    match name, what:
        case "pack-quantized", "int4" | "int8" if group_of[0] == 1:
            return Scheme(
                layout="packed", bits=weights.num_bits, group=group_of, has_zeros=has_zeros, has_order=has_order
            )
        case (("int-quantized" | "naive-quantized"), "int8") if group_of[0] in (0, 1) and not has_order:
            return Scheme(layout="bytes", group=group_of, has_zeros=has_zeros)
        case (("float-quantized" | "naive-quantized"), "float8") if group_of[0] >= 0 and weights.symmetric:
            return Scheme(layout="fp8", group=group_of)
        case "mxfp4-pack-quantized", "float4" if weights.symmetric and group_of == (1, 32):
            return Scheme(layout="fp4", bits=4, group=group_of)
    raise CheckpointError(
        f"{path}: {where}.weights: {what} by {by} in {name} is not supported; take another checkpoint"
    )
