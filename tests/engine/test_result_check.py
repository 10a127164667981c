"""A result that its launch did not ask for costs its worker, and nobody else anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from eventlm.core.state.validate import validate, validate_liveness
from eventlm.engine.replicas.worker_process import WorkerProcess
from eventlm.engine.request import (
    LOGITS_NOT_FINITE,
    FinishedOutput,
    PooledOutput,
    PromptLogprobsOutput,
    Request,
    TokensOutput,
)
from eventlm.engine.result_check import ResultMismatchError
from eventlm.events import Event, StepCompleted, WorkerLost, WorkerUp
from eventlm.events.codec import decode_body, encode_body
from eventlm.sampling_params import SamplingParams, TokenLogprobs
from eventlm.worker.fake.runner import FakeRunner
from eventlm.worker.protocol import FromWorker, RowExtras, StepResult, decode_from_worker, encode
from tests.engine.engines import SLOW, expected_tokens, generate, recorded, request, running, verified
from tests.engine.test_engine_core import Rig

Change = Callable[[StepResult], StepResult]


def requests() -> list[Request]:
    """One of each kind, with everything that a row can give beside its tokens."""
    plain = request(9, seed=1)
    alternatives = structs.replace(plain, sampling=SamplingParams(seed=1, max_tokens=9, logprobs=2, prompt_logprobs=1))
    return [
        plain,
        alternatives,
        structs.replace(plain, sampling=SamplingParams(seed=1, max_tokens=None)).with_scheduling(kind="score"),
        structs.replace(plain, sampling=SamplingParams(seed=1, max_tokens=None)).with_scheduling(kind="pool"),
    ]


class Workbench(Rig):
    """An engine core whose first launch has a row of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.engine_core.put_fact(WorkerUp(replica=0, epoch=1))
        self.submit(*requests())
        self.engine_core.drain(10)

    def answer(self, result: StepResult) -> None:
        super().answer(result)
        self.engine_core.drain(20)


def changed(**fields: Any) -> Change:
    return lambda result: structs.replace(result, **fields)


def with_tokens(row: int, tokens: list[int]) -> Change:
    return lambda result: structs.replace(result, tokens=[*result.tokens[:row], tokens, *result.tokens[row + 1 :]])


def with_extras(index: int, **fields: Any) -> Change:
    """Replace fields of one of the extras: 0 are the alternatives', 1 the scores, 2 the embedding."""

    def change(result: StepResult) -> StepResult:
        extras = list(result.extras)
        extras[index] = structs.replace(extras[index], **fields)
        return structs.replace(result, extras=extras)

    return change


def with_logprobs(**fields: Any) -> Change:
    def change(result: StepResult) -> StepResult:
        logprobs = result.extras[0].logprobs
        assert logprobs is not None
        return with_extras(0, logprobs=structs.replace(logprobs, **fields))(result)

    return change


ONE = TokenLogprobs(logprobs=[-1.0], ranks=[1], top_ids=[[]], top_logprobs=[[]])

MALFORMED: dict[str, Change] = {
    "another step": changed(step=7),
    "another epoch": changed(epoch=9),
    "no time": changed(start_ns=6, end_ns=5),
    "a negative time": changed(start_ns=-1),
    "a time that no log holds": changed(end_ns=2**64 - 1),
    "no rows": changed(tokens=[]),
    "a missing row": lambda result: structs.replace(result, tokens=result.tokens[:-1]),
    "an extra row": lambda result: structs.replace(result, tokens=[*result.tokens, [1]]),
    "an extra token": with_tokens(0, [1, 2]),
    "a token of a row that does not sample": with_tokens(2, [1]),
    "a negative token": with_tokens(0, [-1]),
    "a token beyond any vocabulary": with_tokens(0, [2**64 - 1]),
    "an end of row 99": changed(ends=[(99, "eos")]),
    "an end of row -1": changed(ends=[(-1, "eos")]),
    "an end of a row that does not sample": changed(ends=[(2, "eos")]),
    "two ends of a row": changed(ends=[(0, "eos"), (0, "stop_token")]),
    "extras of row 99": with_extras(0, row=99),
    "extras of row -1": with_extras(0, row=-1),
    "extras of a row twice": with_extras(1, row=1),
    "extras of another row": with_extras(2, row=0),
    "no extras": changed(extras=[]),
    "no log-probabilities": with_extras(0, logprobs=None),
    "log-probabilities of two tokens": with_logprobs(logprobs=[-1.0, -1.0]),
    "log-probabilities without ranks": with_logprobs(ranks=[]),
    "a rank of 0": with_logprobs(ranks=[0]),
    "more alternatives than asked for": with_logprobs(top_ids=[[1, 2, 3]], top_logprobs=[[-1.0, -1.0, -1.0]]),
    "alternatives without values": with_logprobs(top_logprobs=[[]]),
    "an alternative that is no token": with_logprobs(top_ids=[[1, -2]]),
    "a prompt's start at 0": with_extras(0, prompt_start=0),
    "a prompt without log-probabilities": with_extras(1, prompt_logprobs=None),
    "a prompt of one token": with_extras(1, prompt_logprobs=ONE),
    "log-probabilities of the tokens of a score": with_extras(1, embedding=b"1234"),
    "no embedding": with_extras(2, embedding=b""),
    "an embedding of three bytes": with_extras(2, embedding=b"123"),
    "log-probabilities of an embedding": with_extras(2, prompt_start=1, prompt_logprobs=ONE),
    "an operation of negative time": changed(ops={"base": -1}),
    "an operation of endless time": changed(ops={"base": 2**64 - 1}),
    "an operation with a long name": changed(ops={"x" * 1000: 1}),
    "a thousand operations": changed(ops={str(name): 1 for name in range(1000)}),
}


def test_a_right_result_counts_with_all_that_it_gives() -> None:
    bench = Workbench()
    result = bench.result()
    assert [len(tokens) for tokens in result.tokens] == [1, 1, 0, 0]
    assert [extras.row for extras in result.extras] == [1, 2, 3]
    bench.answer(structs.replace(result, ops={"base": 3}))
    kinds = [type(output) for output in bench.outputs if type(output).__name__ != "FinishedOutput"]
    assert kinds == [TokensOutput, PromptLogprobsOutput, TokensOutput, PromptLogprobsOutput, PooledOutput]


def test_rows_that_are_not_finite_have_no_extras_and_end_their_requests() -> None:
    bench = Workbench()
    bench.answer(
        structs.replace(bench.result(), tokens=[[1], [], [], []], ends=[(row, "error") for row in (1, 2, 3)], extras=[])
    )
    ended = [output for output in bench.outputs if isinstance(output, FinishedOutput)]
    assert [(output.reason, output.detail) for output in ended] == [("error", LOGITS_NOT_FINITE)] * 3


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_result_is_refused_and_changes_nothing(change: Change) -> None:
    bench = Workbench()
    result = bench.result()
    wrong = change(result)
    assert wrong != result
    before = bench.engine_core.core.next_seq
    with pytest.raises(ResultMismatchError, match=r"wrong result of step 0|no step is under way"):
        bench.answer(wrong)
    bench.engine_core.drain(30)
    assert bench.engine_core.core.next_seq == before
    assert bench.outputs == []
    # The right one still counts.
    bench.answer(result)
    assert bench.outputs


def test_a_result_counts_once_and_in_its_turn() -> None:
    bench = Workbench()
    first, second = bench.result(), bench.result()
    with pytest.raises(ResultMismatchError):
        bench.engine_core.complete(0, second, start_ns=0, end_ns=0)
    for result in (first, second):
        bench.engine_core.complete(0, result, start_ns=0, end_ns=0)
    for result in (first, second):
        with pytest.raises(ResultMismatchError, match="no step is under way"):
            bench.engine_core.complete(0, result, start_ns=0, end_ns=0)
    bench.engine_core.drain(20)
    assert sum(len(output.token_ids) for output in bench.outputs if isinstance(output, TokensOutput)) == 4


def test_a_result_that_comes_with_its_workers_loss_counts_for_nothing() -> None:
    bench = Workbench()
    bench.engine_core.put_fact(WorkerLost(replica=0, epoch=1))
    bench.engine_core.complete(0, bench.result(), start_ns=0, end_ns=0)
    bench.engine_core.drain(20)
    bench.engine_core.complete(0, bench.result(), start_ns=0, end_ns=0)
    bench.engine_core.put_fact(WorkerUp(replica=0, epoch=2))
    bench.engine_core.drain(30)
    assert bench.outputs == []
    # One step, for a suspect is computed alone.
    assert [launched.epoch for launched in bench.launches] == [2]


def test_a_worker_that_is_replaced_without_a_loss_is_forgotten() -> None:
    bench = Workbench()
    bench.engine_core.put_fact(WorkerUp(replica=0, epoch=2))
    bench.engine_core.complete(0, bench.result(), start_ns=0, end_ns=0)
    bench.engine_core.drain(20)
    del bench.launches[:1], bench.payloads[:1]
    bench.runner = FakeRunner({}, epoch=2, block_size=16, num_blocks=64)
    bench.answer(bench.result())
    assert [output.start for output in bench.outputs if isinstance(output, TokensOutput)] == [0]


INTEGERS = st.one_of(st.integers(-2, 12), st.sampled_from([2**31, 2**53, 2**63 - 1, 2**64 - 1, -(2**63)]))
LOGPROBS = st.none() | st.builds(
    TokenLogprobs,
    logprobs=st.lists(st.floats(), max_size=3),
    ranks=st.lists(INTEGERS, max_size=3),
    top_ids=st.lists(st.lists(INTEGERS, max_size=3), max_size=3),
    top_logprobs=st.lists(st.lists(st.floats(), max_size=3), max_size=3),
)
EXTRAS = st.builds(
    RowExtras,
    row=INTEGERS,
    logprobs=LOGPROBS,
    prompt_start=INTEGERS,
    prompt_logprobs=LOGPROBS,
    embedding=st.binary(max_size=9),
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "epoch": INTEGERS,
    "step": INTEGERS,
    "start_ns": INTEGERS,
    "end_ns": INTEGERS,
    "tokens": st.lists(st.lists(INTEGERS, max_size=3), max_size=6),
    "ends": st.lists(st.tuples(INTEGERS, st.sampled_from(["eos", "stop_token", "grammar", "error"])), max_size=3),
    "extras": st.lists(EXTRAS, max_size=4),
    "ops": st.dictionaries(st.text(max_size=4), INTEGERS, max_size=3),
}
#: Some fields of a right result, replaced by anything that the protocol can carry.
CHANGES = st.fixed_dictionaries({}, optional=FIELDS)


@settings(max_examples=150, deadline=None)
@given(st.lists(CHANGES, min_size=1, max_size=6))
def test_whatever_a_worker_answers_the_engine_goes_on(changes: list[dict[str, Any]]) -> None:
    """Each answer is refused, or its events can be written and read and the state is sound."""
    bench = Workbench()
    events: list[Event] = []
    bench.engine_core.bus.attach(events.append)
    for now_ns, change in enumerate(changes, start=20):
        if not bench.launches:
            break
        message = decode_from_worker(encode(structs.replace(bench.result(), **change)))
        assert isinstance(message, StepResult)
        try:
            bench.engine_core.complete(0, message, start_ns=message.start_ns, end_ns=message.end_ns)
        except ResultMismatchError:
            bench.engine_core.put_fact(WorkerLost(replica=0, epoch=1))
            bench.engine_core.put_fact(WorkerUp(replica=0, epoch=2))
            bench.engine_core.drain(now_ns)
            break
        bench.engine_core.drain(now_ns)
    validate(bench.engine_core.core.state)
    validate_liveness(bench.engine_core.core.state)
    for event in events:
        assert decode_body(encode_body(event)) == event


@pytest.mark.parametrize("name", ["an extra token", "a missing row", "an end of row 99", "another epoch", "repeated"])
async def test_a_worker_with_a_wrong_result_is_lost_and_costs_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    receive, seen = WorkerProcess.receive, list[StepResult]()

    async def change_the_fifth(self: WorkerProcess, timeout_seconds: float) -> FromWorker | None:
        message = await receive(self, timeout_seconds)
        if isinstance(message, StepResult):
            seen.append(message)
            if len(seen) == 5:
                return seen[3] if name == "repeated" else MALFORMED[name](message)
        return message

    monkeypatch.setattr(WorkerProcess, "receive", change_the_fifth)
    async with running(record=tmp_path, fake=SLOW) as engine:
        readers = await generate(engine, *(request(12, seed=seed) for seed in range(4)))
        assert [reader.tokens[0] for reader in readers] == [expected_tokens(seed, 0, 12) for seed in range(4)]
        assert engine.state == "ready"
    events = recorded(engine)
    [lost] = [event for event in events if isinstance(event, WorkerLost)]
    assert lost.reason.startswith("wrong result of step")
    assert [event.epoch for event in events if isinstance(event, StepCompleted)][:5] == [1, 1, 1, 1, 2]
    verified(engine)
