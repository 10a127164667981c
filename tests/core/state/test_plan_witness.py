"""What a witness is told of a plan, and that no decision differs with one."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventlm.bus.log_reader import LogReader
from eventlm.core.state.plan_witness import (
    CandidateSeen,
    ChunkAsked,
    DecodeShort,
    EvictionWeighed,
    PlanEnded,
    PlanEntry,
    TurnTaken,
    VictimSeen,
)
from eventlm.replay.rebuild import rebuild
from eventlm.replay.verify.verifier import Verifier
from tests.core.rig import Rig, arrival
from tests.replay.golden import FOLDER, GOLDEN
from tests.simulation import MemoryLog, Simulation

E = TypeVar("E", bound=PlanEntry)


class Witness(list[PlanEntry]):
    """With its entries by kind."""

    def of(self, kind: type[E]) -> list[E]:
        return [entry for entry in self if isinstance(entry, kind)]


def witnessed(rig: Rig) -> Witness:
    """What the plans of the next drains look at."""
    witness = Witness()
    rig.state.witness = witness
    return witness


def test_candidates_come_in_order_with_what_they_lack() -> None:
    # 12 blocks of 4 tokens: the first takes 9 of them, the second needs 6, the third fits.
    rig = Rig(num_blocks=12, max_model_len=44, max_num_batched_tokens=64)
    witness = witnessed(rig)
    first, second, third = rig.arrive_all(arrival(32, 4), arrival(20, 4), arrival(4, 4))
    seen = witness.of(CandidateSeen)
    assert [(each.sequence.request, each.verdict, each.num_lacking) for each in seen] == [
        (first, "admitted", -3),
        (second, "blocks", 3),
        (third, "admitted", -1),
    ]
    assert [each.urgency for each in seen] == sorted(each.urgency for each in seen)
    # It counts from the next plan on that the second was passed over.
    assert rig.sequence(second).skips == 1
    asked = witness.of(ChunkAsked)
    assert [(each.sequence.request, each.start, each.max_tokens, each.num_tokens) for each in asked] == [
        (first, 0, 32, 32),
        (third, 0, 4, 4),
    ]


def test_a_turn_has_a_beginning_and_an_end() -> None:
    rig = Rig(max_num_seqs=1, max_num_batched_tokens=8)
    witness = witnessed(rig)
    rig.arrive_all(arrival(12, 4), arrival(4, 4))
    begun, *_, ended = witness
    assert begun == TurnTaken(0, 0, 0, 0, 32)
    assert isinstance(ended, PlanEnded)
    assert (ended.step, ended.num_decodes, ended.num_chunks) == (0, 0, 1)
    assert (ended.decode_tokens, ended.num_tokens, ended.budget_tokens) == (0, 8, 8)
    assert ended.rest is not None
    assert ended.rest.cause == "sequence_limit"
    witness.clear()
    rig.complete()
    (partial,) = witness.of(CandidateSeen)
    assert partial.verdict == "partial"


def test_cached_blocks_are_counted() -> None:
    rig = Rig()
    rig.arrive(9, 1, blocks=[1, 2])
    witness = witnessed(rig)
    rig.feed(arrival(9, 1, blocks=[1, 2]))
    rig.complete()
    (seen,) = witness.of(CandidateSeen)
    assert seen.num_hits == 2


def test_the_one_evicted_is_named_and_so_is_who_could_not_be() -> None:
    rig = Rig(num_blocks=8, max_model_len=28)
    first = rig.arrive(8, 8)
    second = rig.arrive(12, 8)
    rig.complete()
    urgent = rig.arrive(14, 2, priority=-1)
    witness = witnessed(rig)
    rig.complete()
    assert [each[1:] for each in witness.of(VictimSeen)] == [((second, 0), "admission", (urgent, 0), "chosen")]
    (weighed,) = witness.of(EvictionWeighed)
    assert (weighed.head, weighed.needs_slot, weighed.is_enough) == ((urgent, 0), False, True)
    assert weighed.num_lacking > 0
    witness.clear()
    rig.arrive(14, 2)
    rig.complete()
    assert [each.verdict for each in witness.of(VictimSeen)] == ["more_urgent"]
    assert rig.sequence(first).resident


def test_an_eviction_that_is_not_enough_is_weighed() -> None:
    rig = Rig(num_blocks=8, max_model_len=28)
    rig.arrive(16, 4, priority=-5)
    below = rig.arrive(4, 4)
    rig.complete()
    rig.arrive(24, 1, priority=-1)
    witness = witnessed(rig)
    rig.complete()
    (seen, *_) = witness.of(VictimSeen)
    assert (seen.sequence.request, seen.verdict) == (below, "chosen")
    assert [each.is_enough for each in witness.of(EvictionWeighed)] == [False]
    assert rig.preempted() == []


def test_a_decode_that_lacks_a_block_and_from_whom_it_gets_one() -> None:
    rig = Rig(num_blocks=6, max_model_len=20)
    first, _, third = rig.arrive_all(*(arrival(4, 12) for _ in range(3)))
    for _ in range(4):
        rig.complete()
    witness = witnessed(rig)
    rig.complete()
    (short, *_) = witness.of(DecodeShort)
    assert (short.sequence.request, short.num_blocks, short.num_available, short.verdict) == (
        first,
        1,
        0,
        "block_taken",
    )
    (victim, *_) = witness.of(VictimSeen)
    assert victim == VictimSeen(0, rig.sequence(third).id, "memory", rig.sequence(first).id, "chosen")


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_traces_verify_with_a_witness(name: str) -> None:
    with LogReader(FOLDER / f"{name}.jsonl") as reader:
        verifier = Verifier(rebuild(reader.header), reader.header, check_invariants=True)
        verifier.core.state.witness = witness = Witness()
        # Every decision is compared as bytes, and the digests of checkpoints too.
        for line in reader:
            verifier.feed(line)
    assert verifier.num_decisions > 100
    launched = [entry for entry in witness.of(PlanEnded) if entry.step >= 0]
    assert len(launched) > 30
    assert len(witness.of(TurnTaken)) == len(witness.of(PlanEnded))


def bodies(seed: int, witness: list[PlanEntry] | None) -> list[bytes]:
    log: Any = MemoryLog()
    simulation = Simulation(seed, num_requests=10, writer=log, check_every=0)
    simulation.engine_core.core.state.witness = witness
    simulation.run()
    return list(log.bodies)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000))
def test_random_workloads_are_the_same_byte_for_byte(seed: int) -> None:
    witness = Witness()
    assert bodies(seed, witness) == bodies(seed, None)
    assert witness
