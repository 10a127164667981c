"""Live requests: what a worker is sent, what the core is told, what a client gets, and that nothing is kept."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from eventlm.engine.block_names import BlockNames
from eventlm.engine.live_requests import LiveRequests
from eventlm.engine.request import (
    ClosingOutput,
    FinishedOutput,
    RequestOutput,
    TokensOutput,
)
from eventlm.errors import EventLMError
from eventlm.events import Arrived, Closing, Emitted, Finished, Launched, StepCompleted
from eventlm.sampling_params import SamplingParams
from eventlm.worker.protocol import StepResult
from tests.made_requests import make_request
from tests.worker.launches import launched

BLOCK_SIZE = 4
OutputOrError = RequestOutput | EventLMError


class Shell:
    """Live requests with one replica, and what each client got."""

    def __init__(self) -> None:
        names = BlockNames(b"n" * 32, block_size=BLOCK_SIZE, capacity=100)
        self.live = LiveRequests(names, block_size=BLOCK_SIZE, seed_key=b"s", digest_key=b"d" * 32)
        self.got: dict[int, list[OutputOrError]] = {}

    def arrive(self, seq: int, prompt: list[int], *, seed: int | None = 1, n: int = 1, **fields: Any) -> Arrived:
        params = SamplingParams(max_tokens=50, seed=seed, n=n)
        request = make_request(prompt, params, **fields)
        sink = self.got.setdefault(seq, []).append
        return self.live.arrive(seq, request, sink, group_size=1, group_index=0)

    def complete(self, launch: Launched, tokens: list[list[int]], **fields: Any) -> StepCompleted:
        result = StepResult(epoch=launch.epoch, step=launch.step, start_ns=1, end_ns=2, tokens=tokens, **fields)
        return self.live.complete(0, result, start_ns=1, end_ns=2)

    def emit(self, *, dropped: list[tuple[int, int]] | None = None) -> None:
        for request, output, _ in self.live.emit(Emitted(replica=0, step=0, num_tokens=0, dropped=dropped or [])):
            request.sink(output)

    def step(self, launch: Launched, tokens: list[list[int]]) -> StepCompleted:
        """A launch that completes with these tokens, all of them emitted."""
        self.live.launch(launch)
        fact = self.complete(launch, tokens)
        self.emit()
        return fact

    def finish(self, seq: int, index: int = 0) -> None:
        output = self.live.finish(Finished(request=seq, index=index, reason="stop", position=1))
        output.request.sink(output.output)


def test_an_arrival_has_lengths_and_integers_and_no_content() -> None:
    shell = Shell()
    fact = shell.arrive(3, [901, 902, 903, 904, 905], cache_salt="secret", n=2)
    assert (fact.prompt_tokens, len(fact.blocks), fact.n, fact.max_tokens) == (5, 1, 2, 50)
    shown = str(structs.asdict(fact))
    assert not any(text in shown for text in ("901", "905", "secret"))
    assert shell.arrive(4, [901, 902, 903, 904, 7], cache_salt="secret").blocks == fact.blocks
    assert shell.arrive(5, [901, 902, 903, 904, 7]).blocks != fact.blocks
    assert shell.arrive(6, [1], kind="score").max_tokens == 0


def test_seeds_are_the_request_s_own_or_drawn_by_its_number() -> None:
    one, other = Shell(), Shell()
    assert one.arrive(1, [1], seed=2**64 - 1).seed == str(2**64 - 1)
    drawn = [one.arrive(seq, [1], seed=None).seed for seq in range(2, 6)]
    assert len(set(drawn)) == 4
    assert [other.arrive(seq, [1], seed=None).seed for seq in range(2, 6)] == drawn


def test_a_worker_is_sent_what_it_lacks_and_only_that() -> None:
    shell = Shell()
    shell.arrive(1, [11, 12, 13], n=2)
    first = shell.live.launch(launched(0, chunks=[(1, 0, 0, 2, 0), (1, 1, 0, 3, 1)]))
    assert [(new.request, new.index, new.token_ids) for new in first.new] == [
        (1, 0, [11, 12, 13]),
        (1, 1, [11, 12, 13]),
    ]
    assert first.new[0].params.seed == 1
    assert shell.live.launch(launched(1, chunks=[(1, 0, 2, 1, 1)], decodes=[(1, 1, 3, 1)])).new == []


def test_a_sequence_that_was_preempted_is_sent_again_with_its_tokens() -> None:
    shell = Shell()
    shell.arrive(1, [11, 12, 13])
    shell.step(launched(0, chunks=[(1, 0, 0, 3, 1)]), [[14]])
    again = shell.live.launch(launched(1, chunks=[(1, 0, 0, 4, 1)], forget=[(1, 0)]))
    assert [(new.token_ids, new.num_prompt_tokens) for new in again.new] == [([11, 12, 13, 14], 3)]


def test_a_new_worker_is_sent_everything_and_steps_of_the_old_one_mean_nothing() -> None:
    shell = Shell()
    shell.arrive(1, [11, 12, 13])
    lost = launched(0, chunks=[(1, 0, 0, 3, 1)])
    shell.live.launch(lost)
    shell.live.set_worker(0, None)
    fact = shell.complete(lost, [[99]])
    assert (fact.c, fact.filled) == (0, [])
    again = shell.live.launch(structs.replace(lost, epoch=2, step=1))
    assert [new.token_ids for new in again.new] == [[11, 12, 13]]


def test_a_completion_counts_tokens_and_hides_them() -> None:
    shell = Shell()
    shell.arrive(1, [11, 12, 13])
    launch = structs.replace(launched(0, chunks=[(1, 0, 0, 3, 1)]), s=7)
    shell.live.launch(launch)
    fact = shell.complete(launch, [[555]], ends=[(0, "eos")])
    assert (fact.c, fact.produced, fact.ends) == (7, [1], [(0, "eos")])
    assert "555" not in str(structs.asdict(fact))
    other = Shell()
    other.arrive(1, [11, 12, 13])
    other.live.launch(launch)
    assert other.complete(launch, [[556]]).digest != fact.digest
    assert len(fact.digest) == 16


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7, 11])
def test_names_of_filled_blocks_do_not_depend_on_how_they_were_filled(chunk: int) -> None:
    """The prompt's full blocks are named at arrival; the others once the KV of their last token is stored."""
    shell, tokens = Shell(), list(range(100, 122))
    arrived = shell.arrive(1, tokens[:11])
    named = list(arrived.blocks)
    assert len(named) == 2
    for start in range(0, 11, chunk):
        count = min(chunk, 11 - start)
        last = start + count == 11
        fact = shell.step(launched(start, chunks=[(1, 0, start, count, int(last))]), [[tokens[11]] if last else []])
        assert fact.filled == []
    for length in range(12, 22):
        fact = shell.step(launched(length, decodes=[(1, 0, length, 0)]), [[tokens[length]]])
        # The step at `length` stores the KV of the token before.
        assert bool(fact.filled) == (length % BLOCK_SIZE == 0)
        named += [integer for _, integers in fact.filled for integer in integers]
    assert Shell().arrive(1, tokens).prompt_tokens == 22
    assert shell.arrive(2, tokens).blocks == named


def test_a_row_of_several_tokens_fills_several_blocks() -> None:
    shell = Shell()
    shell.arrive(1, [1, 2, 3])
    shell.step(launched(0, chunks=[(1, 0, 0, 3, 1)]), [[4]])
    fact = shell.step(launched(1, decodes=[(1, 0, 4, 0)]), [[5, 6, 7, 8, 9]])
    assert [(row, len(integers)) for row, integers in fact.filled] == [(0, 2)]
    assert shell.arrive(2, [1, 2, 3, 4, 5, 6, 7, 8]).blocks == fact.filled[0][1]


def test_what_the_core_drops_is_neither_shown_nor_kept() -> None:
    shell = Shell()
    shell.arrive(1, [1, 2])
    shell.arrive(2, [3, 4])
    launch = launched(0, chunks=[(1, 0, 0, 2, 1), (2, 0, 0, 2, 1)])
    shell.live.launch(launch)
    shell.complete(launch, [[10], [20]])
    shell.emit(dropped=[(0, 1)])
    assert shell.got == {1: [], 2: [TokensOutput(0, 0, [20])]}
    again = shell.live.launch(launched(1, chunks=[(1, 0, 0, 2, 1)], forget=[(1, 0)]))
    assert [new.token_ids for new in again.new] == [[1, 2]]


def test_outputs_of_a_life_and_nothing_remains_of_it() -> None:
    shell = Shell()
    shell.arrive(1, [1, 2], n=2)
    shell.step(launched(0, chunks=[(1, 0, 0, 2, 1), (1, 1, 0, 2, 1)]), [[7], [8]])
    shell.step(launched(1, decodes=[(1, 0, 3, 0)]), [[9]])
    closing = shell.live.start_closing(Closing(request=1, index=0, reason="eos", position=2))
    closing.request.sink(closing.output)
    shell.finish(1, 0)
    assert 1 in shell.live
    shell.finish(1, 1)
    assert shell.got[1] == [
        TokensOutput(0, 0, [7]),
        TokensOutput(1, 0, [8]),
        TokensOutput(0, 1, [9]),
        ClosingOutput(0, "eos", 2),
        FinishedOutput(0, "stop", 1, 0),
        FinishedOutput(1, "stop", 1, 0),
    ]
    assert 1 not in shell.live
    assert len(shell.live) == 0
    shell.live.launch(launched(2, forget=[(1, 0), (1, 1)]))
    shell.complete(launched(2), [])
    worker = shell.live._workers[0]
    assert (shell.live._samples, list(worker.launches), worker.held) == ({}, [], set())


def test_a_rejected_request_leaves_nothing() -> None:
    shell = Shell()
    shell.arrive(1, [1, 2], n=3)
    shell.live.reject(1)
    assert (len(shell.live), shell.live._samples) == (0, {})


def test_a_failure_reaches_every_request_once() -> None:
    shell = Shell()
    error = EventLMError("broken")
    for seq in (1, 2):
        shell.arrive(seq, [1])
    shell.live.fail(error)
    shell.live.fail(error)
    assert shell.got == {1: [error], 2: [error]}
