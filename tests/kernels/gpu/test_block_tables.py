from __future__ import annotations

import pytest
import torch

from benchmarks.kernels.references import cache_slots_reference, write_blocks_reference
from eventlm.kernels.gpu.block_tables import cache_slots, write_blocks


@pytest.mark.parametrize("num_tokens", [0, 1, 127, 130])
@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_each_token_has_its_place(num_tokens: int, block_size: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    tables = torch.randint(0, 1 << 27, (5, 9), generator=generator, dtype=torch.int32)
    token_slots = torch.randint(-1, 5, (num_tokens,), generator=generator, dtype=torch.int32)
    positions = torch.randint(0, 9 * block_size, (num_tokens,), generator=generator, dtype=torch.int32)
    tables, token_slots, positions = (each.to(device) for each in (tables, token_slots, positions))
    found = cache_slots(token_slots, positions, tables, block_size)
    assert torch.equal(found, cache_slots_reference(token_slots, positions, tables, block_size))


@pytest.mark.parametrize("num_updates", [0, 1, 2, 127, 128, 300])
def test_updates_are_written(num_updates: int, device: torch.device) -> None:
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
