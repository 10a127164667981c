"""The fields that config.json has in most families, and the parts of a `ModelSpec` that are made of them alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, get_args

import msgspec
from msgspec import Meta, Struct

from eventlm.field_errors import split_message
from eventlm.models.spec import (
    Activation,
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RecurrentSpec,
    RopeSpec,
    RopeType,
    TensorNames,
)

_MAX_SIZE, _MAX_EXPERTS = (1 << 31) - 1, 1 << 16
#: Limits that no model comes near, so that a config.json that is no model's is refused before much is made of it.
Positive = Annotated[int, Meta(ge=1, le=_MAX_SIZE)]
NotNegative = Annotated[int, Meta(ge=0, le=_MAX_SIZE)]
NumLayers = Annotated[int, Meta(ge=1, le=1024)]
NumExperts = Annotated[int, Meta(ge=1, le=4096)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Size = Annotated[int, Meta(ge=1, le=1 << 20)]
NumHeads = Annotated[int, Meta(ge=1, le=4096)]
HeadSize = Annotated[int, Meta(ge=1, le=4096)]
#: The logarithms of these two are divided by.
Theta = Annotated[float, Meta(gt=1)]
Context = Annotated[int, Meta(ge=2, le=_MAX_SIZE)]
_Factor = Annotated[float, Meta(gt=0, le=1 << 20)]
_Scale = Annotated[float, Meta(ge=0, le=1 << 20)]
_Rotations = Annotated[float, Meta(ge=1e-3, le=1 << 20)]
ROPE_TYPES: tuple[RopeType, ...] = get_args(RopeType)
FULL, SLIDING = "full_attention", "sliding_attention"

#: What transformers calls the activations.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "relu2": "relu2",
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh"),
}
#: What a scaled type of rope must say of itself.
_ROPE_FIELDS: dict[RopeType, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}


class ConfigError(ValueError):
    """What a config.json holds that cannot be served, and what can."""


class Fields(Struct, frozen=True, kw_only=True):
    """The fields of config.json that most families have; a family's own class has its defaults.

    THETA: what the family's own config class assumes where config.json names no base of the rotary embedding.
    REFUSED: fields that change the computation in a way that nothing here computes.
    """

    THETA: ClassVar[float] = 10000.0
    REFUSED: ClassVar[tuple[str, ...]] = (
        *("use_bidirectional_attention", "attention_chunk_size", "clip_qkv", "use_qk_norm", "qk_layernorm"),
    )

    vocab_size: Positive
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: NumLayers
    num_attention_heads: NumHeads
    num_key_value_heads: NumHeads | None = None
    head_dim: HeadSize | None = None
    max_position_embeddings: Context
    rms_norm_eps: PositiveFloat = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None
    rope_theta: Theta | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: Context | None = None
    partial_rotary_factor: float | None = None
    sliding_window: Positive | None = None
    layer_types: list[str] | None = None
    use_bidirectional_attention: Any = None
    attention_chunk_size: Any = None
    clip_qkv: Any = None
    use_qk_norm: Any = None
    qk_layernorm: Any = None

    @property
    def num_kv_heads(self) -> int:
        """As many as query heads unless config.json says another number. Raises ConfigError if they do not divide."""
        count = self.num_key_value_heads or self.num_attention_heads
        if self.num_attention_heads % count:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads {count}"
            )
        return count

    @property
    def size_of_heads(self) -> int:
        """Elements of a head. Raises ConfigError for an odd number."""
        size = self.head_dim or self.hidden_size // self.num_attention_heads
        if size == 0 or size % 2:
            raise ConfigError(f"head_dim is {size}; rotary embeddings need an even one")
        return size


class RopeFields(Struct, frozen=True, kw_only=True):
    """The fields of `rope_scaling`, and of `rope_parameters`, as transformers 5 calls it."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Theta | None = None
    partial_rotary_factor: float | None = None
    factor: _Factor | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    original_max_position_embeddings: Context | None = None
    attention_factor: _Factor | None = None
    mscale: _Scale | None = None
    mscale_all_dim: _Scale | None = None
    beta_fast: _Rotations | None = None
    beta_slow: _Rotations | None = None
    truncate: bool = True
    short_factor: tuple[PositiveFloat, ...] | None = None
    long_factor: tuple[PositiveFloat, ...] | None = None
    llama_4_scaling_beta: float | None = None


def rope_fields(fields: Fields, kind: str = "") -> RopeFields:
    """What config.json says of the rotary embedding, with the precedence of transformers.

    `rope_scaling` hides all of `rope_parameters`. kind: FULL or SLIDING, in families that have one for each: then
    `rope_parameters` has a table for each, and `rope_scaling` changes that of FULL. One that is not there is of the
    default type.
    """
    scaling, parameters = fields.rope_scaling or {}, fields.rope_parameters or {}
    where, values = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters)
    if kind:
        if parameters and not parameters.keys() & {FULL, SLIDING}:
            raise ConfigError(f"rope_parameters needs {FULL} and {SLIDING}, for this architecture's kinds of layers")
        where, values = f"rope_parameters.{kind}", parameters.get(kind) or {}
        if not isinstance(values, dict):
            raise ConfigError(f"{where} is not an object")
        if kind == FULL and scaling:
            where, values = "rope_scaling", values | scaling
    elif any(isinstance(value, dict) for value in values.values()):
        raise ConfigError(f"{where} differ by layer, which this architecture does not have")
    try:
        return msgspec.convert(values, RopeFields)
    except msgspec.ValidationError as error:
        problem, key = split_message(str(error))
        raise ConfigError(f"{'.'.join(filter(None, (where, key)))}: {problem}") from error


def activation(name: str) -> Activation:
    """The activation of this name. Raises ConfigError."""
    if name not in _ACTIVATIONS:
        raise ConfigError(f"hidden_act {name} is not supported (supported: {', '.join(_ACTIVATIONS)})")
    return _ACTIVATIONS[name]


def rope(
    fields: Fields,
    values: RopeFields | None = None,
    *,
    theta: float | None = None,
    partial: float | None = None,
    is_interleaved: bool = False,
) -> RopeSpec:
    """The rotary embedding that `values` describe, by default those of the whole model.

    theta: where they have none; by default that of the top level of config.json. partial: how much of a head a family
    rotates where config.json does not say; None: it rotates whole heads.
    """
    values = values or rope_fields(fields)
    kind = values.rope_type or values.type or "default"
    if kind == "su" or (kind == "yarn" and values.short_factor):
        kind = "longrope"
    if kind not in ROPE_TYPES:
        raise ConfigError(f"rope type {kind} is not supported (supported: {', '.join(ROPE_TYPES)})")
    needed = {name: getattr(values, name) for name in _ROPE_FIELDS[kind]}
    for name, value in needed.items():
        if value is None:
            raise ConfigError(f"rope type {kind} needs {name}")
    share = values.partial_rotary_factor or fields.partial_rotary_factor or partial or 1.0
    size, is_proportional = fields.size_of_heads, kind == "proportional"
    if not 0 < share <= 1 or (partial is None and share != 1 and not is_proportional):
        raise ConfigError(f"partial_rotary_factor {share} is not supported")
    rotary_dim = size if is_proportional else int(size * share)
    if rotary_dim % 2 or rotary_dim == 0:
        raise ConfigError(f"{rotary_dim} elements of a head are rotated; it must be an even number")
    original = (
        fields.original_max_position_embeddings
        or values.original_max_position_embeddings
        or fields.max_position_embeddings
    )
    spec = RopeSpec(
        type=kind,
        theta=values.rope_theta or theta or fields.rope_theta or type(fields).THETA,
        rotary_dim=rotary_dim,
        is_interleaved=is_interleaved,
        original_max_position_embeddings=original,
        num_pairs=int(size * share // 2) if is_proportional else 0,
        **({"factor": values.factor or 1.0} if is_proportional else needed),
    )
    if kind == "llama3" and spec.low_freq_factor >= spec.high_freq_factor:
        raise ConfigError(f"low_freq_factor {spec.low_freq_factor} is not below high_freq_factor")
    for factors in (spec.short_factor, spec.long_factor):
        if kind == "longrope" and len(factors) != rotary_dim // 2:
            raise ConfigError(f"short_factor and long_factor need {rotary_dim // 2} numbers each, not {len(factors)}")
    if kind not in ("yarn", "longrope"):
        return spec
    factor = values.factor or fields.max_position_embeddings / original
    return msgspec.structs.replace(
        spec,
        factor=factor,
        attention_factor=values.attention_factor or _attention_factor(spec, factor, values),
        beta_fast=values.beta_fast or spec.beta_fast,
        beta_slow=values.beta_slow or spec.beta_slow,
        truncate=values.truncate,
    )


def _attention_factor(spec: RopeSpec, factor: float, values: RopeFields) -> float:
    """The one that transformers derives for yarn and longrope."""
    if factor <= 1:
        return 1.0
    if spec.type == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(spec.original_max_position_embeddings))
    above, below = values.mscale, values.mscale_all_dim
    scales = (above, below) if above and below else (1.0, 0.0)
    above, below = (0.1 * scale * math.log(factor) + 1 for scale in scales)
    return above / below


def attention(fields: Fields, **changes: Any) -> AttentionSpec:
    """The attention that most families have; `changes` are fields of `AttentionSpec`."""
    taken = {
        "num_heads": fields.num_attention_heads,
        "num_kv_heads": fields.num_kv_heads,
        "head_dim": fields.size_of_heads,
        "scale": fields.size_of_heads**-0.5,
        "has_qkv_bias": fields.attention_bias,
        "has_output_bias": fields.attention_bias,
    }
    if "rope" not in changes:
        taken["rope"] = rope(fields)
    return AttentionSpec(**(taken | changes))


def feed_forward(fields: Fields, **changes: Any) -> FeedForwardSpec:
    """The feed-forward part that most families have; `changes` are fields of `FeedForwardSpec`."""
    taken: dict[str, Any] = {"size": fields.intermediate_size, "has_bias": fields.mlp_bias}
    if "activation" not in changes:
        taken["activation"] = activation(fields.hidden_act)
    return FeedForwardSpec(**(taken | changes))


def experts(expert: FeedForwardSpec, num_experts: int, num_active: int, **changes: Any) -> ExpertsSpec:
    """A mixture of experts; `changes` are fields of `ExpertsSpec`. Raises ConfigError for an impossible choice."""
    spec = ExpertsSpec(num_experts=num_experts, num_active=num_active, expert=expert, **changes)
    groups = spec.num_groups
    if num_experts % groups or (groups > 1 and num_experts < 2 * groups) or spec.num_active_groups > groups:
        raise ConfigError(f"{spec.num_active_groups} of {groups} groups of {num_experts} experts is not supported")
    if num_active > num_experts // groups * spec.num_active_groups:
        of_groups = f" in {spec.num_active_groups} of {groups} groups" if groups > 1 else ""
        raise ConfigError(f"{num_active} experts for a token is not supported, of {num_experts}{of_groups}")
    return spec


def stacked(names: TensorNames, **changes: str) -> tuple[TensorNames, ...]:
    """The same with the experts of a layer in one tensor, as transformers 5 calls it."""
    taken = {"expert_gate_up": "mlp.experts.gate_up_proj", "expert_down": "mlp.experts.down_proj", "stacking": "rows"}
    return (msgspec.structs.replace(names, **taken | changes),)


def layer_kinds(
    fields: Fields, default: Callable[[int], bool] = lambda layer: False, *, other: str = SLIDING
) -> list[str]:
    """FULL or `other` for each layer: what `layer_types` says, else `other` where `default(layer)`.

    Raises ConfigError for a kind that is neither, and if there is no `sliding_window` for those that need one.
    """
    kinds = fields.layer_types
    if kinds is None:
        kinds = [other if default(layer) else FULL for layer in range(fields.num_hidden_layers)]
    if len(kinds) != fields.num_hidden_layers:
        raise ConfigError(f"layer_types has {len(kinds)} entries, num_hidden_layers is {fields.num_hidden_layers}")
    for kind in kinds:
        if kind not in (FULL, other):
            raise ConfigError(f"layer_types: {kind} is not supported (supported: {FULL}, {other})")
    if SLIDING in kinds and fields.sliding_window is None:
        raise ConfigError(f"layer_types has {SLIDING}, and sliding_window is null")
    return kinds


def window_of(fields: Fields, kind: str) -> int:
    """The window of a layer of this kind; 0: it sees all."""
    return (fields.sliding_window or 0) if kind == SLIDING else 0


def windows(fields: Fields, default: Callable[[int], bool] = lambda layer: False) -> list[int]:
    """The window of each layer, by `layer_kinds`."""
    return [window_of(fields, kind) for kind in layer_kinds(fields, default)]


def hybrid(
    fields: Fields,
    attention: AttentionSpec,
    recurrent: RecurrentSpec,
    kind: str,
    default: Callable[[int], bool] = lambda layer: False,
) -> list[AttentionSpec | RecurrentSpec]:
    """What mixes the tokens in each layer: `recurrent` in those of this kind, see `layer_kinds`.

    Raises ConfigError if no layer has attention: nothing here runs a model without any keys.
    """
    kinds = layer_kinds(fields, default, other=kind)
    if FULL not in kinds:
        raise ConfigError(f"layer_types has no {FULL}, and models without attention are not supported")
    return [recurrent if each == kind else attention for each in kinds]


def model(
    fields: Fields,
    mixers: AttentionSpec | Sequence[AttentionSpec | RecurrentSpec],
    parts: FeedForwardSpec | ExpertsSpec | Sequence[FeedForwardSpec | ExpertsSpec] | None = None,
    *,
    layer: dict[str, Any] | None = None,
    norm: dict[str, Any] | None = None,
    **changes: Any,
) -> ModelSpec:
    """A model of these parts; `changes` are fields of `ModelSpec`.

    mixers, parts: the same in all layers, or one for each. layer, norm: what its `LayerSpec` and its `NormSpec`
    also have. `architecture` and `dtype` are filled in later.
    """
    for name in fields.REFUSED:
        if value := getattr(fields, name):
            raise ConfigError(f"{name} {value} is not supported")
    each = [mixers] * fields.num_hidden_layers if isinstance(mixers, AttentionSpec) else mixers
    attentions = [one for one in each if isinstance(one, AttentionSpec)]
    if not isinstance(parts, Sequence):
        parts = [parts or feed_forward(fields)] * fields.num_hidden_layers
    _check_experts(parts)
    if fields.layer_types is not None and len(attentions) == len(each):
        _check_layer_types(fields, attentions)
    longest = changes.setdefault("max_position_embeddings", _longest_context(fields, attentions))
    taken: dict[str, Any] = {
        "architecture": "",
        "vocab_size": fields.vocab_size,
        "hidden_size": fields.hidden_size,
        "layers": tuple(
            LayerSpec(
                attention=_without_idle_window(one, longest) if isinstance(one, AttentionSpec) else None,
                recurrent=None if isinstance(one, AttentionSpec) else one,
                feed_forward=part,
                **(layer or {}),
            )
            for one, part in zip(each, parts, strict=True)
        ),
        "norm": NormSpec(**({"eps": fields.rms_norm_eps} | (norm or {}))),
        "tie_word_embeddings": fields.tie_word_embeddings,
        "dtype": fields.dtype or fields.torch_dtype or "",
    }
    return ModelSpec(**(taken | changes))


def _longest_context(fields: Fields, attentions: Sequence[AttentionSpec]) -> int:
    """Tokens of the longest context that the model was made for.

    By the convention of transformers, linear scaling and yarn stretch the positions that config.json names, while those
    of llama3 and longrope are stretched already.
    """
    longest = fields.max_position_embeddings
    for rope in (one.rope for one in attentions):
        if rope is not None and rope.type == "linear":
            longest = max(longest, int(fields.max_position_embeddings * rope.factor))
        elif rope is not None and rope.type == "yarn":
            longest = max(longest, int(rope.original_max_position_embeddings * rope.factor))
    return min(longest, _MAX_SIZE)


def _check_experts(parts: Sequence[FeedForwardSpec | ExpertsSpec]) -> None:
    count = sum(part.num_experts for part in parts if isinstance(part, ExpertsSpec))
    if count > _MAX_EXPERTS:
        raise ConfigError(f"all layers together have {count} experts, and at most {_MAX_EXPERTS} are supported")


def _check_layer_types(fields: Fields, attentions: Sequence[AttentionSpec]) -> None:
    """Raise ConfigError if the layers that have a window are not those that `layer_types` names."""
    for kind, attention in zip(layer_kinds(fields), attentions, strict=True):
        if kind == SLIDING and not attention.window:
            raise ConfigError(f"layer_types has {SLIDING}, which this architecture does not have")
        if kind == FULL and attention.window:
            raise ConfigError(
                f"layer_types has {FULL}, and sliding_window {attention.window} is that of all layers of this "
                "architecture; set it to null, or remove layer_types"
            )


def _without_idle_window(attention: AttentionSpec, longest: int) -> AttentionSpec:
    """A window that hides nothing in the longest context is none."""
    return msgspec.structs.replace(attention, window=0) if attention.window >= longest else attention
