"""What attention on a GPU is given and must do, whichever backend computes it.

Shapes: T tokens of the step, R rows, H query heads, K key-value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from eventlm.models.spec import AttentionSpec
from eventlm.worker.gpu.cache import GpuCache
from eventlm.worker.sequence_table import Row


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
    """What a backend is made for. attentions: by layer, all with these numbers of heads. max_rows: most sequences of a
    step; max_context: no sequence gets longer. is_invariant: see `--batch-invariant`.
    """

    attentions: Mapping[int, AttentionSpec]
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

    def attend(self, layer: int, q_THD: Tensor, sinks_H: Tensor | None) -> Tensor:
        """The attention of each query over its sequence, [T, H, D], of the step that has begun.

        It must have the window, the soft cap and the scale of `Geometry.attentions[layer]`: a backend without them
        refuses such models.
        sinks_H: scores that take part in the softmax and have no value, of layers that have them.
        """
        ...
