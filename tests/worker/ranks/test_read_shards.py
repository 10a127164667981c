"""What each rank has of a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eventlm.core.shards import Layout
from eventlm.errors import UsageError
from eventlm.models.config import read_model
from eventlm.worker.protocol import WorkerSetup
from eventlm.worker.ranks.read_shards import read_shards
from tests.checkpoints import make_checkpoint


def setup_of(folder: Path, layout: Layout, device: str) -> WorkerSetup:
    return WorkerSetup(
        replica=0,
        epoch=1,
        model=str(folder),
        block_size=16,
        num_blocks=8,
        max_model_len=64,
        max_num_batched_tokens=16,
        max_num_seqs=2,
        layout=layout,
        device=device,
    )


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_all_ranks_have_the_whole_together(tmp_path: Path, device: str) -> None:
    model = read_model(make_checkpoint(tmp_path))
    assert read_shards(setup_of(tmp_path, Layout(), device), model) == []
    shards = read_shards(setup_of(tmp_path, Layout(2, 2), device), model)
    assert [list(shard.layers) for shard in shards] == [[0], [0], [1], [1]]
    assert [sum(shard.model.num_heads for shard in shards[stage : stage + 2]) for stage in (0, 2)] == [4, 4]
    assert [shard.model.has_lm_head for shard in shards] == [False, False, True, True]


def test_a_model_that_cannot_be_split_so_is_an_error(tmp_path: Path) -> None:
    model = read_model(make_checkpoint(tmp_path))
    with pytest.raises(UsageError, match="a model of 2 layers cannot have 3 stages"):
        read_shards(setup_of(tmp_path, Layout(1, 3), "cpu"), model)


def test_loads_no_torch() -> None:
    code = "import sys, eventlm.worker.ranks.read_shards\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
