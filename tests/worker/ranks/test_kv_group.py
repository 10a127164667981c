"""KV groups: what each has of a step, and that together they compute what one worker does."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eventlm.core.shards import Layout
from eventlm.events.decisions import Launched
from eventlm.kernels.cpu.native import available_builds
from eventlm.worker.protocol import Peers, StepOutput, StepPayload, WorkerSetup
from eventlm.worker.ranks.kv_group import GroupStep, KVGroup
from eventlm.worker.sequence_table import DesyncError, Row, WorkerSequence
from tests.models.families.proof import SMALL, STABLE_BUILD, make_checkpoint
from tests.worker.launches import new_sequence
from tests.worker.ranks.long_talk import LongTalk
from tests.worker.ranks.replica import Replica, assert_alike, numbers_of
from tests.worker.reference import make_runner

_BLOCK, _SHARD, _BLOCKS = 16, 32, 80
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "LlamaForCausalLM"},
    # Windows that begin within shards, and scores that have no value.
    "windows": {"architecture": "GptOssForCausalLM", "sliding_window": 41, "head_dim": 16, "num_local_experts": 4},
}
K2, K3 = Layout(1, 1, 2), Layout(1, 1, 3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By model."""
    found = {}
    for name, fields in MODELS.items():
        found[name] = tmp_path_factory.mktemp("model")
        make_checkpoint(found[name], **{**SMALL, "vocab_size": 300, **fields})
    return found


def talk(
    runner: Any, num_groups: int, forced: Sequence[StepOutput] = (), *, num_shards: int = 4, **fields: Any
) -> list[StepOutput]:
    return LongTalk(
        vocab_size=300,
        num_groups=num_groups,
        shard_tokens=_SHARD,
        block_size=_BLOCK,
        num_blocks=_BLOCKS,
        num_shards=num_shards,
        forced=forced,
        **fields,
    ).run(runner)


def one_worker(folder: Path, num_groups: int, **fields: Any) -> Any:
    return make_runner(folder, block_size=_BLOCK, num_blocks=num_groups * _BLOCKS, **fields)


def replica(folder: Path, layout: Layout, peers: Peers, **fields: Any) -> Replica:
    return Replica(folder, layout, peers, block_size=_BLOCK, num_blocks=_BLOCKS, kv_shard_tokens=_SHARD, **fields)


class Witness:
    """Keeps what each rank gave of rows that several groups compute, by step, row, stage and tensor rank."""

    def __init__(self, watched: Replica) -> None:
        self.seen: dict[tuple[int, ...], list[Tensor]] = {}
        self._replica, self._step = watched, 0
        for rank, runner in enumerate(watched.runners):
            runner._forward.run = self._watch(runner._forward.run, rank)

    def execute(self, launch: Launched, payload: StepPayload) -> StepOutput:
        self._step = launch.step
        return self._replica.execute(launch, payload)

    def _watch(self, run: Any, rank: int) -> Any:
        def watched(rows: Sequence[Row], timer: Any, residual_TH: Any = None, step: GroupStep | None = None) -> Tensor:
            given: Tensor = run(rows, timer, residual_TH, step)
            assert step is not None
            parts = given.split([row.num_tokens for row in rows])
            for own, part in zip(step.own, parts, strict=True):
                if own.first_shared >= 0:
                    place = self._replica.layout.place_of(rank)
                    key = self._step, own.number, place.stage, place.tensor
                    self.seen.setdefault(key, []).append(part.clone())
            return given

        return watched


@pytest.mark.parametrize(
    ("name", "layout", "num_shards"),
    [
        ("llama", K2, 8),
        ("windows", K3, 4),
        ("llama", Layout(2, 1, 3), 4),
        ("llama", Layout(2, 2, 2), 4),
    ],
    ids=str,
)
def test_groups_compute_what_one_worker_does(
    folders: dict[str, Path], name: str, layout: Layout, num_shards: int, tmp_path: Path
) -> None:
    expected = talk(one_worker(folders[name], layout.groups), layout.groups, num_shards=num_shards)
    groups = replica(folders[name], layout, Peers(shared_memory=str(tmp_path)))
    assert_alike(talk(groups, layout.groups, num_shards=num_shards), expected, tolerance=1e-4)


@pytest.mark.skipif(not available_builds(), reason="no build of the forward pass is compiled")
@pytest.mark.parametrize(
    ("name", "layout", "fields"),
    [
        ("llama", K3, {}),
        ("llama", Layout(2, 2, 2), {"kv_cache_dtype": "int8"}),
        ("windows", K2, {}),
    ],
    ids=str,
)
def test_compiled_groups_are_as_near_to_float32_as_one_worker_and_equal_to_the_bit(
    folders: dict[str, Path], name: str, layout: Layout, fields: dict[str, Any], tmp_path: Path
) -> None:
    folder, num_groups = folders[name], layout.groups
    exact = talk(one_worker(folder, num_groups, cpu_kernels="torch"), num_groups)
    fields = {**fields, "dtype": "bfloat16", "cpu_kernels": STABLE_BUILD}
    alone = talk(one_worker(folder, num_groups, **fields), num_groups, exact)
    witness = Witness(replica(folder, layout, Peers(shared_memory=str(tmp_path)), **fields))
    found = talk(witness, num_groups, exact)
    assert distance(found, exact) <= 1.5 * distance(alone, exact)
    together = [each for each in witness.seen.values() if len(each) > 1]
    assert len(together) > 50
    assert all(torch.equal(each[0], other) for each in together for other in each[1:])


def distance(found: Sequence[StepOutput], exact: Sequence[StepOutput]) -> float:
    """The middle one of the rows' largest differences of log-probabilities."""
    pairs = [
        both for each, other in zip(found, exact, strict=True) for both in zip(each.extras, other.extras, strict=True)
    ]
    numbers = [(numbers_of(one), numbers_of(other)) for one, other in pairs]
    assert len(numbers) > 20
    return statistics.median(max(abs(a - b) for a, b in zip(*both, strict=True)) for both in numbers)


@pytest.mark.skipif(not available_builds(), reason="no build of the forward pass is compiled")
@pytest.mark.parametrize("kernels", ["torch", STABLE_BUILD])
def test_gloo_and_shared_memory_give_the_same_bits(
    folders: dict[str, Path], kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = "float32" if kernels == "torch" else "bfloat16"

    def talk_over(name: str) -> list[StepOutput]:
        (tmp_path / name).mkdir()
        peers = Peers(shared_memory=str(tmp_path / name))
        return talk(replica(folders["llama"], K2, peers, dtype=dtype, cpu_kernels=kernels), 2, num_shards=3)

    shared = talk_over("shared")
    monkeypatch.setattr("eventlm.worker.ranks.connect.available_builds", list)
    assert talk_over("carried") == shared


class NoExchange:
    """Of a member that needs nobody for what is tested."""

    group: Any = None
    is_waiting = False

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    def gather(self, mine: Tensor) -> Tensor:
        raise AssertionError


def kv_group(number: int) -> KVGroup:
    """Of three groups of 10 blocks of 4 tokens, with shards of 8."""
    setup = WorkerSetup(
        replica=0,
        epoch=1,
        model="",
        block_size=4,
        num_blocks=10,
        max_model_len=64,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        kv_shard_tokens=8,
    )
    return KVGroup(setup, NoExchange(3, number))


def row(start: int, num_tokens: int, blocks: list[int]) -> Row:
    sequence = WorkerSequence(new_sequence(1, list(range(64))))
    sequence.block_table = array("i", blocks)
    return Row(sequence, start, num_tokens, samples=True)


def test_a_row_is_computed_by_the_groups_that_hold_its_context() -> None:
    # Begins in the second group, goes on in the third and in the first, and comes back to the second.
    long = row(26, 1, [11, 12, 25, 24, 3, 4, 19])
    short = row(0, 7, [21, 22])
    steps = [kv_group(number).share([short, long]) for number in range(3)]
    assert [step.num_shared for step in steps] == [1, 1, 1]
    assert [[own.number for own in step.own] for step in steps] == [[1], [1], [0, 1]]
    first, second, third = (step.own[-1] for step in steps)
    assert {own.holders for own in (first, second, third)} == {(1, 2, 0)}
    assert [own.first_shard for own in (first, second, third)] == [2, 0, 1]
    assert [own.blocks.tolist() for own in (first, second, third)] == [[3, 4], [1, 2, 9], [5, 4]]
    assert [own.num_before for own in (first, second, third)] == [8, 10, 8]
    assert [own.is_stored for own in (first, second, third)] == [False, True, False]
    alone = steps[2].own[0]
    assert (alone.first_shared, alone.is_stored, alone.blocks.tolist()) == (-1, True, [1, 2])


def test_blocks_of_another_group_are_a_desync() -> None:
    with pytest.raises(DesyncError, match="sequence 1/0: shard 1 has blocks of another group"):
        kv_group(2).share([row(8, 4, [11, 12, 5])])
