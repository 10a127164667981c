"""What the fake worker remembers of KV blocks: rows that read their own context pass, all others are refused."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from eventlm.core.state.block_pool import BlockPool
from eventlm.core.state.replica import Replica
from eventlm.core.state.sequence import Sequence
from eventlm.sampling_params import SamplingParams
from eventlm.worker.fake.runner import FakeRunner
from eventlm.worker.fake.tokens import fake_token
from eventlm.worker.protocol import StepPayload
from eventlm.worker.sequence_table import DesyncError
from tests.simulation import Chaos, Simulation
from tests.worker.launches import launched, new_sequence, payload

SIZE = 4
BLOCKS = list(range(8))
PARAMS = SamplingParams(seed=9, ignore_eos=True)
#: No number of a block, a request or a position.
PROMPT = [70_000 + index for index in range(10)]


class Bench:
    """A fake runner, and the number of its next step."""

    def __init__(self) -> None:
        self.runner = FakeRunner({}, epoch=1, block_size=SIZE, num_blocks=64)
        self.step = 0

    def prefill(self, request: int, tokens: list[int], blocks: list[int], *, start: int = 0, index: int = 0) -> None:
        """A new sequence, whose tokens before `start` are said to be in its blocks already."""
        new = new_sequence(request, tokens, index=index, params=PARAMS)
        self.execute(payload(new), chunks=[(request, index, start, len(tokens) - start, 1)], blocks=[(0, 0, blocks)])

    def decode(self, *lengths: tuple[int, int], **more: Any) -> None:
        """One row of each (request, length)."""
        self.execute(payload(), decodes=[(request, 0, length, 0) for request, length in lengths], **more)

    def forget(self, *requests: int) -> None:
        self.execute(payload(), forget=[(request, 0) for request in requests])

    def execute(self, beside: StepPayload, **launch: Any) -> None:
        self.runner.execute(launched(self.step, **launch), beside)
        self.step += 1


@pytest.fixture
def bench() -> Bench:
    return Bench()


def refused(block: int, sequence: str, token: int, writer: str) -> Any:
    since = f"what it holds began with {writer}" if writer else "nothing was written to it"
    message = f"sequence {sequence}: block {block} does not hold its context at token {token}; {since}$"
    return pytest.raises(DesyncError, match=message)


def test_a_sequence_reads_what_it_wrote_in_chunks_and_decodes(bench: Bench) -> None:
    bench.execute(payload(new_sequence(1, PROMPT)), chunks=[(1, 0, 0, 3, 0)], blocks=[(0, 0, [9, 2, 5])])
    bench.execute(payload(), chunks=[(1, 0, 3, 6, 0)])
    bench.execute(payload(), chunks=[(1, 0, 9, 1, 1)])
    for length in range(11, 30):
        bench.decode((1, length), blocks=[(0, length // SIZE, [length])] if length % SIZE == 1 else [])


def test_prefix_hits_read_what_others_wrote_before_them_or_in_the_same_step(bench: Bench) -> None:
    bench.prefill(1, PROMPT, [0, 1, 2])
    bench.prefill(2, [*PROMPT[:8], 1], [0, 1, 3], start=8)
    bench.prefill(1, PROMPT, [0, 1, 4], start=8, index=1)
    bench.decode((1, 11), (2, 10))
    bench.forget(1, 2)
    bench.prefill(3, [*PROMPT, 5], [0, 1, 2], start=8)
    pair = payload(new_sequence(4, [3] * 8), new_sequence(5, [3] * 8))
    bench.execute(pair, chunks=[(4, 0, 0, 8, 1), (5, 0, 4, 4, 1)], blocks=[(0, 0, [20, 21]), (1, 0, [20, 22])])


def test_a_sequence_that_comes_again_may_hit_what_it_had(bench: Bench) -> None:
    bench.prefill(1, PROMPT, [0, 1, 2])
    bench.decode((1, 11))
    bench.forget(1)
    own = [fake_token(9, 0, position) for position in range(2)]
    bench.prefill(1, [*PROMPT, *own], [0, 1, 2], start=11)
    bench.forget(1)
    # The last token of a row is not computed before the next row.
    with refused(3, "1/0", 12, ""):
        bench.prefill(1, [*PROMPT, *own, 5, 6], [0, 1, 2, 3], start=13)


@pytest.mark.parametrize("given", [[], [[5, 6, 7]]])
def test_drafts_that_were_accepted_are_in_the_cache_and_others_are_not(bench: Bench, given: list[list[int]]) -> None:
    bench.prefill(1, PROMPT, BLOCKS)
    for _ in range(4):
        length = len(bench.runner._table[1, 0].token_ids)  # type: ignore[index]
        launch = structs.replace(launched(bench.step, decodes=[(1, 0, length, 0)]), most=[3])
        bench.runner.execute(launch, StepPayload(forced=given))
        bench.step += 1
    tokens = bench.runner._table[1, 0].token_ids  # type: ignore[index]
    assert len(tokens) > 14
    bench.forget(1)
    bench.prefill(2, tokens, BLOCKS, start=len(tokens) - 1)
    bench.forget(2)
    with refused(len(tokens) // SIZE, "3/0", len(tokens), ".*"):
        bench.prefill(3, [*tokens, 8, 9], BLOCKS, start=len(tokens) + 1)


def test_a_block_that_two_sequences_write_to_is_refused(bench: Bench) -> None:
    bench.prefill(1, PROMPT, [0, 1, 2])
    bench.prefill(2, [5, 6, 7, 8, 9], [3, 1])
    with refused(1, "1/0", 4, "2/0") as caught:
        bench.decode((1, 11))
    assert not any(str(token) in str(caught.value) for token in PROMPT)


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_so_is_one_that_both_write_to_in_a_step(bench: Bench, order: tuple[int, int]) -> None:
    bench.prefill(1, PROMPT, [0, 1, 2])
    bench.prefill(2, [5] * 8, [3, 4])
    rows = [(request, {1: 11, 2: 9}[request]) for request in order]
    with refused(2, "1/0", 8, "2/0"):
        bench.decode(*rows, blocks=[(order.index(2), 2, [2])])


def test_a_stale_prefix_hit_is_refused(bench: Bench) -> None:
    bench.prefill(1, PROMPT, [0, 1, 2])
    bench.forget(1)
    bench.prefill(2, [*PROMPT[:4], 1, 2, 3], [0, 1], start=4)
    bench.forget(2)
    with refused(1, "3/0", 4, "2/0"):
        bench.prefill(3, PROMPT, [0, 1, 5], start=8)


def test_the_same_tokens_after_others_are_another_context(bench: Bench) -> None:
    bench.prefill(1, PROMPT, [0, 1, 2])
    bench.prefill(2, [1, 2, 3, 4, *PROMPT[4:]], [3, 4, 5])
    with refused(4, "3/0", 4, "2/0"):
        bench.prefill(3, PROMPT, [0, 4, 6], start=8)


def test_a_block_of_which_nothing_was_computed_is_refused(bench: Bench) -> None:
    with refused(7, "1/0", 0, ""):
        bench.prefill(1, PROMPT, [7, 8, 9], start=8)
    other = Bench()
    other.prefill(1, PROMPT[:6], [0, 1])
    with refused(1, "2/0", 6, "1/0"):
        other.prefill(2, PROMPT, [0, 1, 2], start=8)


def test_a_block_given_back_and_taken_while_a_step_is_in_flight_is_refused(bench: Bench) -> None:
    bench.prefill(1, PROMPT, [0, 1, 2])
    bench.decode((1, 11))
    # The first sequence is thought to have ended by its step in flight.
    bench.prefill(2, [5, 6], [2])
    with refused(2, "1/0", 8, "2/0"):
        bench.execute(payload(), decodes=[(1, 0, 11, 1)])


def test_one_that_is_forgotten_first_may_be_taken(bench: Bench) -> None:
    bench.prefill(1, PROMPT, [0, 1, 2])
    bench.execute(payload(new_sequence(2, [5, 6])), forget=[(1, 0)], chunks=[(2, 0, 0, 2, 1)], blocks=[(0, 0, [2])])
    bench.decode((2, 3))


def test_a_block_is_in_a_table_once(bench: Bench) -> None:
    with pytest.raises(DesyncError, match="sequence 1/0: block 1 is twice in its table"):
        bench.prefill(1, PROMPT, [0, 1, 1])


CALM = Chaos(cancels=0, kills=0, poison_ppm=0)


def test_simulations_refuse_a_block_that_is_given_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = BlockPool.allocate

    def planted(pool: BlockPool, num_blocks: int, group: int = 0) -> list[int]:
        held = [block for block, count in enumerate(pool.references) if count and pool.group_of(block) == group]
        blocks = allocate(pool, num_blocks, group)
        return [*blocks[:-1], held[-1]] if len(held) == 5 and blocks else blocks

    monkeypatch.setattr(BlockPool, "allocate", planted)
    with pytest.raises(DesyncError, match="does not hold its context"):
        Simulation(3, chaos=CALM, check_every=0).run()


def test_simulations_refuse_a_tree_that_names_other_content(monkeypatch: pytest.MonkeyPatch) -> None:
    insert = BlockPool.insert

    def planted(pool: BlockPool, names: list[int], parent: int, blocks: list[int]) -> int:
        return insert(pool, names, parent, blocks[::-1])

    monkeypatch.setattr(BlockPool, "insert", planted)
    with pytest.raises(DesyncError, match="does not hold its context"):
        Simulation(3, chaos=CALM, check_every=0).run()


def test_simulations_refuse_an_exchanged_block_that_the_worker_was_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange_hits = Replica.exchange_hits

    def planted(replica: Replica, sequence: Sequence, block_size: int) -> None:
        shipped_blocks = sequence.shipped_blocks
        exchange_hits(replica, sequence, block_size)
        sequence.shipped_blocks = shipped_blocks

    monkeypatch.setattr(Replica, "exchange_hits", planted)
    with pytest.raises(DesyncError, match="does not hold its context"):
        Simulation(4, chaos=CALM, check_every=0).run()


def test_simulations_refuse_hits_on_the_cache_of_a_worker_that_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    reset = BlockPool.reset
    monkeypatch.setattr(BlockPool, "reset", lambda pool: None if hasattr(pool, "references") else reset(pool))
    with pytest.raises(DesyncError, match="; nothing was written to it"):
        Simulation(4, check_every=0).run()
