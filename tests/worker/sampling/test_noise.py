from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from eventlm.worker.sampling.noise import hash_ids, negative_gumbel_noise, noise_keys, sequence_key

CPU = torch.device("cpu")


def noise(rows: list[tuple[int, int, int]], ids: torch.Tensor) -> torch.Tensor:
    """Of (seed, index, position)."""
    keys = np.array([sequence_key(seed, index) for seed, index, _ in rows], dtype=np.uint64)
    positions = np.array([position for _, _, position in rows])
    return -negative_gumbel_noise(noise_keys(keys, positions, CPU), hash_ids(ids.to(torch.int32)))


def test_it_is_keyed_by_seed_index_and_position() -> None:
    rows = [(seed, index, position) for seed in (0, 1, 2**64 - 1) for index in (0, 1) for position in (0, 1, 2**20)]
    found = noise(rows, torch.arange(10_000))
    assert len({tuple(values.tolist()) for values in found}) == len(rows)
    correlation = np.corrcoef(found.numpy()) - np.eye(len(rows))
    assert np.abs(correlation).max() < 5 / np.sqrt(10_000)


def test_a_row_s_does_not_depend_on_the_others() -> None:
    rows = [(seed, index, position) for seed in range(3) for index in range(2) for position in (0, 5)]
    ids = torch.arange(100)
    together = noise(rows, ids)
    for number, row in enumerate(rows):
        assert torch.equal(noise([row], ids)[0], together[number])


def test_an_entry_s_does_not_depend_on_the_others() -> None:
    rows = [(1, 0, 0), (2, 0, 0)]
    ids = torch.arange(49152)
    some = torch.stack((ids[7::13][:100], ids.flip(0)[:100]))
    assert torch.equal(noise(rows, some), noise(rows, ids).gather(1, some))


def test_it_never_changes() -> None:
    assert noise([(42, 1, 7)], torch.tensor([0, 1, 49151])).tolist()[0] == pytest.approx(
        [1.80576, 0.744045, 1.641344], abs=1e-5
    )


def test_it_is_gumbel_over_entries_and_over_positions() -> None:
    found = noise([(3, 0, position) for position in range(200)], torch.arange(5000)).double().numpy()
    assert np.isfinite(found).all()
    uniform = np.exp(-np.exp(-found))
    for axis in (uniform.ravel(), uniform[0], uniform[:, 0], uniform[:, 4999]):
        assert stats.kstest(axis, "uniform").pvalue > 1e-3
    # The next position's, and the neighbour's, say nothing about it.
    for first, second in ((uniform[:-1], uniform[1:]), (uniform[:, :-1], uniform[:, 1:])):
        squares = np.histogram2d(first.ravel(), second.ravel(), bins=32)[0]
        assert stats.chisquare(squares.ravel()).pvalue > 1e-3


def test_the_largest_and_the_smallest_are_finite() -> None:
    keys = torch.zeros(1, 2, dtype=torch.int32)
    ids = torch.arange(-(2**22), 2**22, dtype=torch.int32)
    found = negative_gumbel_noise(keys, ids * 512)
    assert found.isfinite().all()
    assert found.max() < 4
    assert found.min() > -23
