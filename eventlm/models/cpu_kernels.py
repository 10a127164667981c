"""Which forward pass a value of `--cpu-kernels` means for a model on this machine. Loads no torch."""

from __future__ import annotations

from typing import NamedTuple

from eventlm.errors import UsageError
from eventlm.kernels.cpu import native
from eventlm.kernels.cpu.native import NativeShape, unsupported
from eventlm.models.config import DecoderConfig

#: The values that name no build.
AUTO, TORCH = "auto", "torch"
#: What may be wrong with a build that the processor could run, and what to do.
_NOT_COMPILED = "not compiled, or of another version; install eventlm again, where there is a C++ compiler"
#: The only dtype that the compiled forward pass computes in.
_DTYPE = "bfloat16"


class ForwardChoice(NamedTuple):
    """`build` of the compiled forward pass; if it is empty, torch's operations, and `reason` is why, if not by wish."""

    build: str
    reason: str


def choose_build(wanted: str) -> str:
    """With `auto` the fastest one; empty for torch's operations.

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
    """For a model: the one that is wanted; with `auto` the fastest that can run it. `dtype` is a resolved one.

    Raises UsageError if the one that is wanted cannot be had, or cannot run the model.
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
    """What the compiled decoder must know of a model."""
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
