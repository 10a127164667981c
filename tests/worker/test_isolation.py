from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from eventlm.worker.isolation import keeps_apart, num_blocks_written
from eventlm.worker.sequence_table import Row

EMBEDDING = torch.randn((50, 8), generator=torch.Generator().manual_seed(1))

Model = Callable[[Tensor, Tensor], Tensor]


def causal_sums(rows: Sequence[Row], memory: dict[int, Tensor]) -> Tensor:
    """What keeps sequences apart: of each the sum of its tokens so far, kept by its first block."""
    sums = []
    for row in rows:
        ids = row.sequence.token_ids[row.start : row.start + row.num_tokens]
        block = row.sequence.block_table[0]
        before = memory[block] if row.start else torch.zeros(8)
        sums.append(before + EMBEDDING[ids].cumsum(0))
        memory[block] = sums[-1][-1]
    return torch.cat(sums)


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        (lambda x, positions: x * torch.tanh(x), True),
        (lambda x, positions: x + positions[:, None], True),
        # Of the token before, of all, and of places in the row.
        (lambda x, positions: x + x.roll(1, 0), False),
        (lambda x, positions: x - x.mean(0), False),
        (lambda x, positions: x + x.roll(-1, 0), False),
        (lambda x, positions: x + torch.arange(len(x))[:, None], False),
    ],
)
@pytest.mark.parametrize(("block_size", "num_blocks"), [(2, 9), (16, 9), (2, 2), (2, 5), (16, 2)])
def test_what_is_mixed_is_seen(beside: Model, expected: bool, block_size: int, num_blocks: int) -> None:
    memory: dict[int, Tensor] = {}
    blocks: set[int] = set()

    def run(rows: Sequence[Row]) -> Tensor:
        positions = torch.cat([torch.arange(row.start, row.start + row.num_tokens) for row in rows])
        blocks.update(*(row.sequence.block_table for row in rows))
        return beside(causal_sums(rows, memory), positions)

    assert keeps_apart(run, vocab_size=50, block_size=block_size, num_blocks=num_blocks) == expected
    assert blocks == set(range(num_blocks_written(block_size, num_blocks)))


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        (lambda x: x, True),
        # As products of other numbers of rows round.
        (lambda x: x * (1 + len(x) / 1000), True),
        (lambda x: x + 0.2 * x.mean(0), False),
        (lambda x: x + 0.05 * x.roll(1, 0), False),
        (lambda x: x + 0.05 * x.roll(-1, 0), False),
        (lambda x: x + 0.1 * x.sum(0), False),
        (lambda x: x * torch.nan, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_little_that_is_mixed_is_seen(beside: Callable[[Tensor], Tensor], expected: bool, dtype: torch.dtype) -> None:
    memory: dict[int, Tensor] = {}

    def run(rows: Sequence[Row]) -> Tensor:
        return beside(causal_sums(rows, memory).to(dtype))

    assert keeps_apart(run, vocab_size=50, block_size=16, num_blocks=2) == expected


def test_one_token_fits() -> None:
    memory: dict[int, Tensor] = {}
    assert keeps_apart(lambda rows: causal_sums(rows, memory), vocab_size=50, block_size=1, num_blocks=3)
    mixing = lambda rows: causal_sums(rows, memory).cumsum(0)  # noqa: E731
    assert not keeps_apart(mixing, vocab_size=50, block_size=1, num_blocks=3)


def test_two_sequences_that_cannot_be_together() -> None:
    def fail(rows: Sequence[Row]) -> Tensor:
        raise AssertionError(rows)

    assert keeps_apart(fail, vocab_size=50, block_size=16, num_blocks=1)
