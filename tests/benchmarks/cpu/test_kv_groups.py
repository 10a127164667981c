"""Ranks of KV groups read their share of a context."""

from __future__ import annotations

import pytest

from benchmarks.cpu.kv_groups import measure
from eventlm.kernels.cpu.native import available_builds


@pytest.mark.soak
@pytest.mark.skipif(not available_builds(), reason="no build of the forward pass is compiled")
@pytest.mark.parametrize(("num_groups", "most"), [(2, 0.52), (3, 0.38)])
def test_each_rank_reads_its_share(num_groups: int, most: float) -> None:
    alone, *ranks = measure(num_groups, 32768, 2048)
    assert sum(rank.kv_bytes for rank in ranks) == alone.kv_bytes
    assert all(rank.kv_bytes <= most * alone.kv_bytes for rank in ranks)
    assert all(rank.attention_ms > 0 for rank in ranks)
