"""The forward pass that a value of `--cpu-kernels` selects for a model on this machine. Loads no torch."""

from __future__ import annotations

from typing import NamedTuple

from eventlm.errors import UsageError
from eventlm.kernels.cpu import native
from eventlm.kernels.cpu.native import (
    ACTIVATIONS,
    QK_NORMS,
    WEIGHTS,
    Instruction,
    NativeModel,
    NativeShape,
    unsupported,
)
from eventlm.models.program import (
    Activate,
    ActivateInput,
    Add,
    AddKept,
    AddNormed,
    Attend,
    Convolve,
    Delta,
    Embed,
    Experts,
    Heads,
    Inputs,
    Keep,
    Multiply,
    MultiplyAdd,
    Norm,
    Operation,
    Route,
    Scale,
    ScaleInner,
    Take,
    program_of,
)
from eventlm.models.spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, ModelSpec, RecurrentSpec

#: The values that name no build.
AUTO, TORCH = "auto", "torch"
#: Why a build that the processor could run may be missing, and what to do.
_NOT_COMPILED = "not compiled, or of another version; install eventlm again, where there is a C++ compiler"
#: In the order of program.h's Kind.
_KINDS = (
    *(Embed, Norm, Take, Heads, Attend, Activate, MultiplyAdd, Multiply, AddNormed),
    *(Route, ScaleInner, Experts, Add, Convolve, Delta),
    *(Inputs, ActivateInput, Scale, Keep, AddKept),
)
#: The only dtype that the compiled forward pass computes in.
_DTYPE = "bfloat16"


class ForwardChoice(NamedTuple):
    """`build` of the compiled forward pass. Empty: torch's operations, for `reason` unless they were asked for."""

    build: str
    reason: str


def choose_build(wanted: str) -> str:
    """The build of the compiled forward pass, with `auto` the fastest; empty for torch's operations.

    Raises UsageError if the one that is wanted is not available.
    """
    if wanted == TORCH:
        return ""
    available = native.available_builds()
    if wanted == AUTO:
        return available[0] if available else ""
    if wanted in available:
        return wanted
    lacks = not native.BUILDS[wanted] <= native.processor_flags()
    reason = "its processor lacks what they need" if lacks else f"they are {_NOT_COMPILED}"
    raise UsageError(
        f"--cpu-kernels {wanted}: not on this machine, {reason}; available: {', '.join((AUTO, *available, TORCH))}"
    )


def choose_operations(wanted: str, dtype: str) -> str:
    """The build whose products and attention a model gets that transformers computes in `dtype`; empty: torch's.

    Raises UsageError if the one that is wanted is not available.
    """
    build = choose_build(wanted)
    return build if dtype == _DTYPE else ""


def choose_forward(
    wanted: str, config: ModelSpec, *, model: str, dtype: str, block_size: int, quantization: str = "none"
) -> ForwardChoice:
    """The one that is wanted for a model; with `auto` the fastest that can run it. `dtype` is resolved.

    Raises UsageError if the one that is wanted is not available, or cannot run the model, or if torch's operations do
    not have the quantization.
    """
    choice = _choose(wanted, config, model=model, dtype=dtype, block_size=block_size)
    if quantization == "int4" and not choice.build:
        reason = f"cannot run {model}: {choice.reason}" if choice.reason else f"--cpu-kernels {TORCH} leaves out"
        raise UsageError(
            f"--quantization int4 needs the compiled forward pass, which {reason}; take int8 or leave it out"
        )
    return choice


def _choose(wanted: str, config: ModelSpec, *, model: str, dtype: str, block_size: int) -> ForwardChoice:
    build = choose_build(wanted)
    if wanted == TORCH:
        return ForwardChoice("", "")
    if dtype != _DTYPE:
        reason = f"it computes in {_DTYPE}, not {dtype}"
    elif not build:
        reason = f"it is {_NOT_COMPILED}"
    else:
        reason = unsupported(native_model(config), block_size)
    if not reason:
        return ForwardChoice(build, "")
    if wanted != AUTO:
        raise UsageError(f"--cpu-kernels {wanted} cannot run {model}: {reason}; use {AUTO} or {TORCH}")
    return ForwardChoice("", reason)


def native_model(config: ModelSpec) -> NativeModel:
    """The model as the compiled decoder takes it."""
    inputs = config.layer_inputs
    shape = NativeShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        is_tied=config.tie_word_embeddings,
        has_lm_head=config.has_lm_head,
        is_layer_norm=config.norm.kind == "layer",
        inputs_size=inputs.size if inputs is not None else 0,
        inputs_vocab_size=inputs.vocab_size if inputs is not None else 0,
        eps=config.norm.eps,
        logits_multiplier=config.logits_multiplier,
        logits_soft_cap=config.logits_soft_cap,
    )
    instructions = [_instruction(operation, config) for operation in program_of(config)]
    return NativeModel(shape, instructions, config.norm.offset)


def _instruction(operation: Operation, config: ModelSpec) -> Instruction:
    found = Instruction(
        kind=_KINDS.index(type(operation)),
        layer=getattr(operation, "layer", 0),
        multiplier=getattr(operation, "multiplier", 1.0),
    )
    match operation:
        case Norm() | AddNormed() | Keep() | AddKept():
            found.weight = WEIGHTS.index(operation.weight)
        case MultiplyAdd() | Multiply():
            found.weight = WEIGHTS.index(operation.matrix)
        case Activate():
            part = config.layers[operation.layer].dense
            if part is not None:
                _put_neurons(found, part)
        case ActivateInput():
            found.num_neurons, found.activation = operation.size, ACTIVATIONS.index(operation.activation)
        case Heads():
            attention = operation.attention
            _put_attention(found, attention)
            found.rope, found.has_value_norm = operation.rope, attention.has_value_norm
            found.num_kv_heads, found.num_value_heads = attention.num_key_products, attention.num_value_products
        case Attend():
            _put_attention(found, operation.attention)
        case Convolve():
            _put_recurrent(found, operation.convolution, operation.state)
        case Delta():
            delta = operation.delta
            _put_recurrent(found, delta, operation.state)
            found.num_key_heads, found.num_value_heads = delta.num_key_heads, delta.num_value_heads
            found.key_dim, found.value_dim = delta.key_dim, delta.value_dim
            found.is_interleaved = delta.is_interleaved
        case Route():
            _put_routing(found, operation.experts)
        case Experts():
            found.num_experts, found.num_active = operation.experts.num_experts, operation.experts.num_active
            _put_neurons(found, operation.experts.expert)
    return found


def _put_neurons(to: Instruction, part: FeedForwardSpec) -> None:
    to.num_neurons, to.is_gated = part.size, part.is_gated
    to.activation = ACTIVATIONS.index(part.activation)


def _put_routing(to: Instruction, experts: ExpertsSpec) -> None:
    to.num_experts, to.num_active = experts.num_experts, experts.num_active
    to.num_groups, to.num_active_groups = experts.num_groups, experts.num_active_groups
    to.is_sigmoid, to.is_normalized = experts.routing == "sigmoid", experts.is_normalized
    to.min_sum, to.multiplier = experts.min_sum, experts.scaling


def _put_recurrent(to: Instruction, spec: RecurrentSpec, state: int) -> None:
    to.num_channels, to.num_taps, to.state = spec.num_channels, spec.num_taps, state


def _put_attention(to: Instruction, attention: AttentionSpec) -> None:
    to.num_heads, to.num_kv_heads, to.head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    to.qk_norm = QK_NORMS.index(attention.qk_norm)
    to.window, to.soft_cap, to.score_divisor = attention.window, attention.soft_cap, 1 / attention.scale
    to.has_output_gate = attention.has_output_gate
    if attention.rope is not None:
        to.rotary_dim, to.num_turned = attention.rope.rotary_dim, attention.rope.num_turned
        to.is_interleaved = attention.rope.is_interleaved
        to.query_scaling_beta = attention.query_scaling_beta
        to.positions_per_scale = attention.rope.original_max_position_embeddings
