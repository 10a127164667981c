"""Attention on a GPU, by plug-ins: Triton kernels, flash-attn where it is installed, torch's operations.

A backend is a class with a name, found among the built-in ones or by an entry point of the group
`eventlm.attention_backends`. `auto` takes the first of the built-in ones that can run the model here.

Shapes: T tokens of the step, R rows, H query heads, K key-value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eventlm.errors import UsageError
from eventlm.worker.gpu.cache import GpuCache
from eventlm.worker.protocol import GPU_BACKEND_GROUP, GPU_BACKENDS
from eventlm.worker.sequence_table import Row

AUTO = "auto"


class AttentionRows(NamedTuple):
    """What attention must know of a step. Decodes come first; int32 tensors are on the device.

    rows: as the worker has them; empty for a CUDA graph. slots_R: of the sequences in `block_tables`. lengths_R: of the
    sequences with this step, 0 of what only pads a batch. order_D: the rows that decode, longest contexts first. With
    rows that are no decodes: starts_R of their queries in the sequences, query_starts_R1 in the step's tokens, tiles_N2
    of queries (row, first query of the row).
    """

    rows: Sequence[Row]
    num_decodes: int
    block_tables: Tensor
    slots_R: Tensor
    lengths_R: Tensor
    order_D: Tensor
    starts_R: Tensor | None = None
    query_starts_R1: Tensor | None = None
    tiles_N2: Tensor | None = None


class Geometry(NamedTuple):
    """What a backend is made for. max_rows: most sequences of a step; max_context: no sequence gets longer.
    is_invariant: see `--batch-invariant`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    max_rows: int
    max_context: int
    dtype: torch.dtype
    kv_dtype: str
    device: torch.device
    is_invariant: bool


class AttentionBackend(Protocol):
    """Attends, once the step's keys and values are in the cache."""

    #: Queries of a tile of `AttentionRows.tiles_N2`; 0 if it wants none.
    tile_queries: int
    #: Whether decodes are to be among them.
    tiles_decodes: bool
    #: Whether a step that only decodes can be captured as a CUDA graph.
    can_be_captured: bool

    @classmethod
    def refusal(cls, geometry: Geometry) -> str:
        """Why it cannot run such a model here; empty if it can."""
        ...

    def __init__(self, geometry: Geometry) -> None: ...

    def begin(self, cache: GpuCache, step: AttentionRows) -> None:
        """A step begins: what is the same for all layers is made here."""
        ...

    def attend(self, layer: int, q_THD: Tensor) -> Tensor:
        """The attention of each query over its sequence, [T, H, D], of the step that has begun."""
        ...


class Choice(NamedTuple):
    """A backend's name, its class, and why it was chosen."""

    name: str
    backend: type[AttentionBackend]
    reason: str


def builtin_backends() -> dict[str, type[AttentionBackend]]:
    """By name, the one that `auto` tries first first."""
    from eventlm.worker.gpu.flash_attention import FlashAttention
    from eventlm.worker.gpu.sdpa_attention import SdpaAttention
    from eventlm.worker.gpu.triton_attention import TritonAttention

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
