"""Attention backends on a GPU: Triton kernels, flash-attn where it is installed, torch's operations, and plug-ins.

A backend is a class with a name, built in or found by an entry point of the group `eventlm.attention_backends`. `auto`
takes the first built-in one that can run the model here.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import NamedTuple

from eventlm.errors import UsageError
from eventlm.worker.gpu.attention import AttentionBackend, Geometry
from eventlm.worker.gpu.flash_attention import FlashAttention
from eventlm.worker.gpu.sdpa_attention import SdpaAttention
from eventlm.worker.gpu.triton_attention import TritonAttention
from eventlm.worker.protocol import GPU_BACKEND_GROUP, GPU_BACKENDS

AUTO = "auto"


class Choice(NamedTuple):
    """A backend's name, its class, and why it was chosen."""

    name: str
    backend: type[AttentionBackend]
    reason: str


def builtin_backends() -> dict[str, type[AttentionBackend]]:
    """By name, the one that `auto` tries first first."""
    classes = (TritonAttention, FlashAttention, SdpaAttention)
    return dict(zip(GPU_BACKENDS, classes, strict=True))


def choose_backend(wanted: str, geometry: Geometry) -> Choice:
    """The one that is wanted; with `auto` the first that can run the model.

    Raises UsageError if there is none of that name, or if it cannot run the model.
    """
    builtin = builtin_backends()
    if wanted == AUTO:
        refusals = {}
        for name, backend in builtin.items():
            refusals[name] = backend.refusal(geometry)
            if not refusals[name]:
                others = [f"{other}: {why}" for other, why in refusals.items() if why]
                return Choice(name, backend, "; ".join([*others, "the first that can run the model"]))
        raise UsageError(f"no attention backend can run the model: {refusals}")
    backend = builtin.get(wanted) or _installed(wanted, list(builtin))
    refusal = backend.refusal(geometry)
    if refusal:
        raise UsageError(f"--attention-backend {wanted} cannot run the model: {refusal}; use {AUTO}")
    return Choice(wanted, backend, "it was asked for")


def _installed(name: str, builtin: list[str]) -> type[AttentionBackend]:
    """Of a third party."""
    found = {point.name: point for point in entry_points(group=GPU_BACKEND_GROUP)}
    if name not in found:
        known = ", ".join([AUTO, *builtin, *sorted(found)])
        raise UsageError(f"--attention-backend {name}: there is none of that name; there are {known}")
    try:
        backend: type[AttentionBackend] = found[name].load()
    except Exception as error:
        raise UsageError(f"--attention-backend {name} cannot be loaded: {type(error).__name__}: {error}") from error
    return backend
