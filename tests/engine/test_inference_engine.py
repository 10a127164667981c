"""The engine over real fake workers: what a client gets, and that nobody waits for ever whatever breaks."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest
from msgspec import structs

from eventlm.config import WorkerConfig
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.rate_limits import RateLimitError, RateLimits
from eventlm.engine.request import (
    ContextLengthError,
    EngineUnavailableError,
    GroupSizeError,
    IdempotencyKey,
    KeyReusedError,
    KeyTakenError,
    QueueFullError,
    RequestHandle,
    Submission,
    TakenOver,
    TokensOutput,
)
from eventlm.errors import CheckpointError, UsageError
from eventlm.events import Arrived, Cancelled, Emitted, End, Finished
from eventlm.system.system import real_system
from tests.engine.engines import (
    SLOW,
    Reader,
    expected_tokens,
    fake_setup,
    generate,
    recorded,
    request,
    running,
    verified,
)
from tests.processes import PATIENCE_SECONDS, is_running, running_children


async def is_empty(engine: InferenceEngine) -> bool:
    """Whether core and shell have forgotten everything, once what is under way has ended."""
    engine_core = engine._require_engine_core()
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        if not engine_core.core.state.requests and not len(engine_core.live) and not engine._undecided:
            return not engine_core.live._samples
        await asyncio.sleep(0.005)
    return False


# --- what a client gets


async def test_every_sequence_gets_its_tokens_in_order(tmp_path: Path) -> None:
    async with running(record=tmp_path, replicas=2) as engine:
        assert engine.state == "ready"
        assert all(map(is_running, engine.worker_pids))
        group = [request(20, seed=seed, n=2, prompt=range(seed, 40)) for seed in range(8)]
        for seed, reader in enumerate(await generate(engine, *group)):
            assert reader.tokens == [expected_tokens(seed, index, 20) for index in range(2)]
            assert reader.reasons == ["length", "length"]
            assert [each.position for each in reader.finished if each] == [20, 20]
        assert await is_empty(engine)
    assert engine.state == "dead"
    events = recorded(engine)
    assert isinstance(events[-1], End)
    assert sum(isinstance(event, Arrived) for event in events) == 8
    verified(engine)


async def test_a_text_end_is_owed_once_and_ends_the_sequence() -> None:
    async with running() as engine:
        [reader] = await generate(engine, request(8, has_text_ends=True))
        assert [(closing.reason, closing.position) for closing in reader.closings] == [("length", 8)]
        assert reader.reasons == ["length"]
        [handle] = await engine.submit([request(200, has_text_ends=True)])
        reader = Reader(handle)
        await reader.until_tokens(6)
        handle.text_ended(0, 5, "stop")
        await reader.done()
        assert [(each.reason, each.position) for each in reader.finished if each] == [("stop", 5)]
        handle.text_ended(0, 5, "stop")
        assert await is_empty(engine)


async def test_a_deadline_is_kept_by_a_timer(tmp_path: Path) -> None:
    # By that prediction the deadline can be met; by the first step, which no test sees the end of, it cannot.
    fake = {"base_ns": 3600 * 10**9}
    async with running(record=tmp_path, fake=fake, predictor=[1, 0, 0, 0, 0]) as engine:
        [reader] = await generate(engine, request(5, deadline_ns=50_000_000, drop_if_late=True))
        assert reader.reasons == ["deadline"]
    events = recorded(engine)
    [arrived], [finished] = ([event for event in events if isinstance(event, kind)] for kind in (Arrived, Finished))
    assert finished.ts - arrived.ts >= 50_000_000


async def test_drawn_seeds_differ_and_are_recorded(tmp_path: Path) -> None:
    async with running(record=tmp_path) as engine:
        readers = await generate(engine, *(request(8, seed=None) for _ in range(3)))  # type: ignore[arg-type]
    seeds = [int(event.seed) for event in recorded(engine) if isinstance(event, Arrived)]
    assert len(set(seeds)) == 3
    assert [reader.tokens[0] for reader in readers] == [expected_tokens(seed, 0, 8) for seed in seeds]


async def test_no_client_sees_a_token_before_its_fact_is_written(tmp_path: Path) -> None:
    async with running(record=tmp_path) as engine:
        [handle] = await engine.submit([request(30)])
        seen = 0
        async for output in handle:
            seen += len(getattr(output, "token_ids", ()))
            assert sum(event.num_tokens for event in recorded(engine) if isinstance(event, Emitted)) >= seen
    assert seen == 30


async def test_a_handle_ends_when_another_reader_takes_the_reply_over() -> None:
    handle = RequestHandle(0, 1, lambda *_: None, lambda *_: None)
    output = TokensOutput(0, 0, [1, 2])
    handle.put(output)
    handle.put(TakenOver())
    handle.put(TokensOutput(0, 2, [3]))
    assert [each async for each in handle] == [output]


# --- who is turned away


async def test_who_is_turned_away() -> None:
    engine = InferenceEngine(fake_setup(), real_system())
    with pytest.raises(EngineUnavailableError, match="loading"):
        await engine.submit([request()])
    with pytest.raises(EngineUnavailableError, match="not running"):
        _ = engine.bus
    await engine.stop()
    with pytest.raises(EngineUnavailableError, match="dead"):
        await engine.submit([request()])
    async with running(max_num_seqs=2, max_queue_len=1, max_num_batched_tokens=64, fake=SLOW) as engine:
        assert await engine.submit([]) == []
        with pytest.raises(ContextLengthError, match="510 prompt tokens and 12"):
            await engine.submit([request(prompt=[1] * 510)])
        with pytest.raises(ContextLengthError):
            await engine.submit([request(prompt=[])])
        with pytest.raises(UsageError):
            await engine.submit([request(n=0)])
        with pytest.raises(GroupSizeError, match="4 sequences at once, and this server takes 3 at most"):
            await engine.submit([request(n=2), request(n=2)])
        [handle] = await engine.submit([request(400, n=3)])
        with pytest.raises(QueueFullError) as caught:
            await engine.submit([request()])
        assert not isinstance(caught.value, GroupSizeError)
        handle.cancel()
        readers = await generate(engine, *(request(3, seed=seed, offline=True) for seed in range(9)))
        assert [reader.tokens[0] for reader in readers] == [expected_tokens(seed, 0, 3) for seed in range(9)]
        assert await is_empty(engine)


# --- keys


def keyed(reply_id: str, body: bytes = b"body", **limits: int) -> Submission:
    key = IdempotencyKey(b"key", body)
    return Submission(reply_id=reply_id, is_resumable=True, idempotency_key=key, limits=RateLimits(**limits))


async def test_of_submissions_with_the_same_key_one_is_admitted() -> None:
    async with running(fake=SLOW) as engine:
        names = ["r0", "r1", "r2"]
        found = await asyncio.gather(
            *(engine.submit([request(3)], submission=keyed(name)) for name in names),
            engine.submit([request(3)], submission=keyed("other", b"another body")),
            return_exceptions=True,
        )
        assert [type(each) for each in found] == [list, KeyTakenError, KeyTakenError, KeyReusedError]
        first, joined = Reader(found[0][0]), []  # type: ignore[index]
        once = RateLimits(requests_per_minute=1)
        key = keyed("r").idempotency_key
        assert key is not None
        reply = await engine.join(key, "", lambda index, output: joined.append(output), once)
        assert (reply.submission.reply_id, reply.requests) == ("r0", [first.handle.request])
        with pytest.raises(RateLimitError):
            await engine.join(key, "", lambda index, output: None, once)
        assert (await first.done()).reasons == ["length"]
        assert [output.token_ids for output in joined if isinstance(output, TokensOutput)] == [
            [token] for token in expected_tokens(5, 0, 3)
        ]
        assert joined[-1] == first.finished[0]


async def test_who_is_refused_does_not_take_the_key() -> None:
    async with running(max_num_seqs=1, max_queue_len=0, fake=SLOW) as engine:
        [busy] = await engine.submit([request(400)])
        refused, waiting = await asyncio.gather(
            engine.submit([request(2)], submission=keyed("r1")),
            engine.submit([request(2)], submission=keyed("r2")),
            return_exceptions=True,
        )
        assert (type(refused), type(waiting)) == (QueueFullError, QueueFullError)
        busy.cancel()


async def test_who_leaves_undecided_does_not_take_the_key() -> None:
    async with running(fake=SLOW) as engine:
        leaving, staying = (asyncio.create_task(engine.submit([request(2)], submission=keyed(name))) for name in "ab")
        await asyncio.sleep(0)
        leaving.cancel()
        [handle] = await staying
        assert (await Reader(handle).done()).reasons == ["length"]
        assert engine.registry.find("b", "").submission.idempotency_key is not None
        assert await is_empty(engine)


# --- clients that leave


@pytest.mark.parametrize("num_ticks", [0, 1, 2, 3, 5, 20])
async def test_a_client_that_leaves_while_its_group_is_undecided(num_ticks: int) -> None:
    async with running(fake=SLOW) as engine:
        submission = asyncio.create_task(engine.submit([request(400), request(400, n=2)]))
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        submission.cancel()
        [handles] = await asyncio.gather(submission, return_exceptions=True)
        for handle in handles if isinstance(handles, list) else ():
            handle.cancel()
        assert await is_empty(engine)


async def test_a_cancelled_request_ends_wherever_it_is(tmp_path: Path) -> None:
    async with running(record=tmp_path, max_num_seqs=4, max_num_batched_tokens=64, fake=SLOW) as engine:
        handles = await engine.submit([request(300, seed=seed, has_text_ends=seed % 2 == 1) for seed in range(12)])
        readers = [Reader(handle) for handle in handles]
        await readers[0].until_tokens(3)
        for handle in handles:
            handle.cancel()
            handle.cancel()
        assert [(await reader.done()).reasons for reader in readers] == [["cancelled"]] * 12
        handles[0].cancel()
        assert await is_empty(engine)
        assert (await generate(engine, request(4)))[0].tokens == [expected_tokens(5, 0, 4)]
    verified(engine)


# --- starts and stops


@pytest.mark.parametrize("how", ["stop", "cancel", "both"])
@pytest.mark.parametrize("delay", [0.0, 0.005, 0.02, 0.06, 0.15])
async def test_an_end_at_any_moment_of_the_start(tmp_path: Path, how: str, delay: float) -> None:
    engine = InferenceEngine(fake_setup(record=tmp_path, replicas=2), real_system())
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(delay)
    if how != "stop":
        starting.cancel()
    if how != "cancel":
        await engine.stop()
    [result] = await asyncio.gather(starting, return_exceptions=True)
    assert result is None or isinstance(result, EngineUnavailableError | asyncio.CancelledError)
    await engine.stop()
    assert engine.state == "dead"
    assert running_children() == []


async def test_a_start_that_fails_ends_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = structs.replace(fake_setup(replicas=3), model=str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="none"):
        await InferenceEngine(setup, real_system()).start()
    assert running_children() == []
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineUnavailableError, match=r"worker \d died \(exit code 1\) while it started"):
        await InferenceEngine(fake_setup(replicas=2), real_system()).start()


async def test_a_worker_that_never_gets_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(silent))
    engine = InferenceEngine(fake_setup(worker=WorkerConfig(start_timeout_seconds=1)), real_system())
    with pytest.raises(EngineUnavailableError, match="worker 0 sent no valid message in 1 s while it started"):
        await engine.start()
    assert running_children() == []


async def test_a_stop_ends_what_runs_waits_and_has_just_come(tmp_path: Path) -> None:
    engine = InferenceEngine(
        fake_setup(record=tmp_path, max_num_seqs=4, max_num_batched_tokens=64, fake=SLOW), real_system()
    )
    await engine.start()
    readers = [Reader(handle) for handle in await engine.submit([request(300) for _ in range(8)])]
    await readers[0].until_tokens(2)
    late = asyncio.create_task(engine.submit([request(300)]))
    await asyncio.sleep(0)
    await asyncio.gather(engine.stop(), engine.stop())
    readers += [Reader(handle) for handle in await late]
    assert [(await reader.done()).reasons for reader in readers] == [["cancelled"]] * 9
    events = recorded(engine)
    assert [event.reason for event in events if isinstance(event, Cancelled)] == ["shutdown"] * 9
    assert sum(isinstance(event, Finished) for event in events) == 9
    assert isinstance(events[-1], End)
    verified(engine)
    readers[0].handle.cancel()
    readers[0].handle.text_ended(0, 1)
