"""The forward pass that a value of `--cpu-kernels` selects for a model on this machine. Loads no torch."""

from __future__ import annotations

from typing import NamedTuple

from eventlm.errors import UsageError
from eventlm.kernels.cpu import native
from eventlm.kernels.cpu.native import NativeShape, unsupported
from eventlm.models.config import DecoderConfig

#: The values that name no build.
AUTO, TORCH = "auto", "torch"
#: Why a build that the processor could run may be missing, and what to do.
_NOT_COMPILED = "not compiled, or of another version; install eventlm again, where there is a C++ compiler"
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


def choose_forward(wanted: str, config: DecoderConfig, *, model: str, dtype: str, block_size: int) -> ForwardChoice:
    """The one that is wanted for a model; with `auto` the fastest that can run it. `dtype` is resolved.

    Raises UsageError if the one that is wanted is not available, or cannot run the model.
    """
    build = choose_build(wanted)
    if wanted == TORCH:
        return ForwardChoice("", "")
    if dtype != _DTYPE:
        reason = f"it computes in {_DTYPE}, not {dtype}"
    elif not build:
        reason = f"it is {_NOT_COMPILED}"
    else:
        reason = unsupported(native_shape(config, config.max_position_embeddings), block_size)
    if not reason:
        return ForwardChoice(build, "")
    if wanted != AUTO:
        raise UsageError(f"--cpu-kernels {wanted} cannot run {model}: {reason}; use {AUTO} or {TORCH}")
    return ForwardChoice("", reason)


def native_shape(config: DecoderConfig, max_positions: int) -> NativeShape:
    """The model's shape, as the compiled decoder takes it."""
    return NativeShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_positions=max_positions,
        is_tied=config.tie_word_embeddings,
        eps=config.rms_norm_eps,
    )
