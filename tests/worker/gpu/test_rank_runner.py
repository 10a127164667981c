"""Ranks on GPUs that share a model, against the one that has all of it, on the same launches. They are threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventlm.core.shards import Layout
from eventlm.worker.gpu.rank_runner import GpuRankRunner
from eventlm.worker.protocol import Peers, StepOutput
from tests.models.families.proof import SMALL, make_checkpoint
from tests.worker.gpu.driven import gpu_runner, gpu_setup
from tests.worker.ranks.replica import Replica, Talk, assert_alike

pytestmark = pytest.mark.usefixtures("one_kernel_at_a_time")

#: Four prompts' rows, in steps that Triton's interpreter takes little time for.
FIELDS: dict[str, Any] = {
    "num_blocks": 256,
    "max_model_len": 192,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 4,
    "graph_buckets": [],
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "LlamaForCausalLM", "attention_bias": True, "tie_word_embeddings": True},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "head_dim": 16},
}
T2, S2, BOTH = Layout(2, 1), Layout(1, 2), Layout(2, 2)


def make_rank(folder: Path, **changes: Any) -> GpuRankRunner:
    return GpuRankRunner(gpu_setup(folder, **changes))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By model."""
    found = {}
    for name, fields in MODELS.items():
        found[name] = tmp_path_factory.mktemp("model")
        make_checkpoint(found[name], **{**SMALL, "vocab_size": 60, **fields})
    return found


def talk(runner: Any) -> list[StepOutput]:
    return Talk(vocab_size=60, num_sequences=2).run(runner, num_decodes=1)


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[StepOutput]]:
    """Of one worker, by model."""
    return {name: talk(gpu_runner(folder, **FIELDS)) for name, folder in folders.items()}


@pytest.mark.parametrize(
    ("name", "layout"), [("llama", T2), pytest.param("qwen3", S2, marks=pytest.mark.soak), ("qwen3", BOTH)], ids=str
)
def test_ranks_compute_what_one_worker_does(
    folders: dict[str, Path], expected: dict[str, list[StepOutput]], name: str, layout: Layout, tmp_path: Path
) -> None:
    replica = Replica(folders[name], layout, Peers(shared_memory=str(tmp_path)), make_rank, **FIELDS)
    if layout == BOTH:
        # Each stage alone, which leaves nothing behind.
        samples = replica.on_all(lambda rank: replica.runners[rank].warm_up())
        assert [[each.shape for each in found] for found in samples] == [[each.shape for each in samples[0]]] * 4
    found = talk(replica)
    assert_alike(found, expected[name], tolerance=1e-4)
    assert {len(each.stages) for each in found if each.tokens} == {layout.stages if layout.stages > 1 else 0}
    assert not any(runner.waits_for_peers for runner in replica.runners)
