"""Ranks read and hold their share of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cpu.rank_weights import measure_all
from eventlm.core.shards import Layout
from tests.kernels.cpu.decoders import Shape, write_checkpoint


@pytest.mark.soak
@pytest.mark.parametrize("kernels", ["compiled", "torch"])
@pytest.mark.parametrize("layout", [Layout(2), Layout(1, 2)])
def test_each_rank_has_its_share(tmp_path: Path, layout: Layout, kernels: str) -> None:
    """3 heads of keys on 2 ranks, and a vocabulary at both ends of the stages."""
    shape = Shape(768, 2048, 8192, num_heads=9, num_kv_heads=3, head_dim=64, num_layers=12)
    whole, *ranks = measure_all(write_checkpoint(tmp_path, shape, max_positions=256), layout, kernels=kernels)
    assert whole.memory > 150e6
    for rank in ranks:
        assert rank.memory < 0.55 * whole.memory
        assert rank.read < 0.51 * whole.read
