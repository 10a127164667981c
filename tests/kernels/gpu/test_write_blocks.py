from __future__ import annotations

import pytest
import torch

from eventlm.kernels.gpu.write_blocks import write_blocks, write_blocks_reference


@pytest.mark.parametrize("num_updates", [0, 1, 2, 127, 128, 300])
def test_against_torch(num_updates: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    num_slots, max_blocks = 17, 40
    cells = torch.randperm(num_slots * max_blocks, generator=generator)[:num_updates].to(torch.int32)
    # What lies behind the updates of a step is of a step before, or nothing.
    updates = torch.full((300, 3), 2_000_000_000, dtype=torch.int32)
    updates[:num_updates] = torch.stack((cells // max_blocks, cells % max_blocks, torch.arange(num_updates)), dim=1)
    updates = updates.to(device)
    expected, tables = (torch.full((num_slots, max_blocks), -1, dtype=torch.int32, device=device) for _ in range(2))
    write_blocks_reference(updates, num_updates, expected)
    write_blocks(updates, num_updates, tables)
    assert torch.equal(tables, expected)


def test_tables_may_be_a_part_of_wider_ones(device: torch.device) -> None:
    wide = torch.zeros(4, 9, dtype=torch.int32, device=device)
    write_blocks(torch.tensor([[3, 5, 77], [0, 0, 5]], dtype=torch.int32, device=device), 2, wide[:, 2:8])
    assert wide[3, 7] == 77
    assert wide[0, 2] == 5
    assert wide.count_nonzero() == 2
