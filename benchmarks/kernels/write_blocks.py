"""Updates of block tables: a launch, of hardly any bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.references import write_blocks_reference
from eventlm.kernels.gpu.block_tables import write_blocks


def cases(device: torch.device, *, smoke: bool) -> Iterator[KernelCase]:
    """A block for each of some sequences."""
    for num_updates in (3,) if smoke else (16, 256):
        slots = torch.randperm(256, dtype=torch.int32)[:num_updates]
        updates = torch.stack((slots, slots + 100, slots * 50), dim=1).to(device)
        tables = torch.zeros(256, 2560, dtype=torch.int32, device=device)
        yield KernelCase(
            name=f"write_blocks {num_updates}",
            run=partial(_run, updates, tables),
            reference=partial(_reference, updates, torch.zeros_like(tables)),
            num_bytes=updates.nbytes + 4 * num_updates,
            tolerance=0.0,
        )


def _run(updates_U3: Tensor, block_tables: Tensor) -> Tensor:
    write_blocks(updates_U3, len(updates_U3), block_tables)
    return block_tables


def _reference(updates_U3: Tensor, block_tables: Tensor) -> Tensor:
    write_blocks_reference(updates_U3, len(updates_U3), block_tables)
    return block_tables
