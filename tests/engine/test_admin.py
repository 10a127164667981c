"""What operators and limits do to a real engine: each change of the core is a fact, and the trace verifies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET, structs

from eventlm.config import CacheConfig
from eventlm.engine.admin import (
    Abort,
    AdminAction,
    AmbiguousRequestError,
    Drain,
    EngineStatus,
    FlushCache,
    FlushedCache,
    Pause,
    ReadStatus,
    Restart,
    RestartError,
    Resume,
    SwapPolicy,
    UnknownPolicyError,
    UnknownRequestError,
)
from eventlm.engine.engine_core import EngineCore
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.rate_limits import BucketState, RateLimitError, RateLimits
from eventlm.engine.request import EngineUnavailableError, QueueFullError, Request, Submission, UnknownReplyError
from eventlm.errors import UsageError
from eventlm.events import CacheFlushed, Cancelled, Paused, PolicySwapped, Resumed
from eventlm.system.system import real_system
from tests.engine.engines import SLOW, Reader, fake_setup, generate, recorded, request, running, verified


def submission(reply_id: str = "cmpl-1", owner: str = "a", request_id: str = "", **limits: Any) -> Submission:
    return Submission(reply_id=reply_id, owner=owner, request_id=request_id, limits=RateLimits(**limits))


async def submit(engine: InferenceEngine, one: Request, of: Submission) -> Reader:
    [handle] = await engine.submit([one], submission=of)
    return Reader(handle)


async def test_actions_are_facts(tmp_path: Path) -> None:
    async with running(record=tmp_path, extra_policy=["edf:multiplier=2", "lrs"]) as engine:

        async def do(action: AdminAction) -> EngineStatus:
            return await engine.administer(action)

        status = await do(ReadStatus())
        assert (status.state, status.paused, status.policy) == ("ready", False, "fcfs")
        assert status.policies == ["fcfs", "edf", "lrs"]
        assert [replica.num_blocks for replica in status.replicas] == [64]
        assert (await do(SwapPolicy(name="edf"))).policy == "edf"
        with pytest.raises(
            UnknownPolicyError, match=r"'lpm'; installed at start: fcfs, edf, lrs; .* --extra-policy NAME"
        ):
            await do(SwapPolicy(name="lpm"))
        with pytest.raises(UnknownPolicyError, match=r"'efd'; did you mean edf\? Installed at start: fcfs, edf, lrs; "):
            await do(SwapPolicy(name="efd"))
        with pytest.raises(RestartError, match="start the server with --recover"):
            await do(Restart())
        assert (await do(Pause())).paused
        assert engine.metrics().paused
        waiting = await submit(engine, request(12, prompt=range(40)), submission())
        assert (await do(Pause())).num_waiting == 1
        assert not (await do(Resume())).paused
        assert not (await do(Resume())).paused
        await waiting.done()
        [cached] = (await do(ReadStatus())).replicas
        assert (cached.num_held_blocks, cached.num_cached_blocks) == (0, 3)
        flushed = await do(FlushCache())
        assert (flushed.flushed, flushed.replicas[0].num_cached_blocks) == (
            FlushedCache(num_blocks=3, num_replicas=1),
            0,
        )
        assert (await do(FlushCache())).flushed == FlushedCache(num_blocks=0, num_replicas=1)
        assert (await do(ReadStatus())).flushed is UNSET
        [again] = await generate(engine, request(12, prompt=range(40)))
        assert again.finished[0] is not None
        assert again.finished[0].cached_tokens == 0
    kinds = (PolicySwapped, Paused, Resumed, CacheFlushed)
    assert [type(event) for event in recorded(engine) if isinstance(event, kinds)] == [*kinds, CacheFlushed]
    verified(engine)


async def test_a_swap_is_for_the_replicasets_that_have_the_policy() -> None:
    first, other = fake_setup(), fake_setup(extra_policy=["lrs"])
    other = structs.replace(
        other,
        core=structs.replace(other.core, models=["other"]),
        name="b",
        first_replica=1,
        first_worker=1,
        num_workers=2,
    )
    engine = InferenceEngine(first, real_system(), [other])
    await engine.start()
    try:
        status = await engine.administer(SwapPolicy(name="lrs"))
        assert (status.policy, status.policies) == ("fcfs, lrs", ["fcfs", "lrs"])
        assert (await engine.administer(SwapPolicy(name="fcfs"))).policy == "fcfs, fcfs"
        with pytest.raises(UnknownPolicyError, match="installed at start: fcfs, lrs"):
            await engine.administer(SwapPolicy(name="lpm"))
    finally:
        await engine.stop()


async def test_a_drain_lets_what_runs_end_and_can_be_taken_back() -> None:
    async with running(fake=SLOW) as engine:
        running_reader = await submit(engine, request(5), submission())
        assert (await engine.administer(Drain())).state == "draining"
        with pytest.raises(EngineUnavailableError, match="draining"):
            await engine.submit([request()])
        assert (await running_reader.done()).reasons == ["length"]
        assert (await engine.administer(Resume())).state == "ready"
        await generate(engine, request(2))
        await engine.administer(Drain())
        still = engine.state
    assert still == "draining"
    with pytest.raises(EngineUnavailableError):
        await engine.administer(Resume())


async def test_a_stop_amid_a_drain_ends_what_still_runs(tmp_path: Path) -> None:
    async with running(record=tmp_path, fake=SLOW) as engine:
        reader = await submit(engine, request(400), submission())
        await reader.until_tokens(1)
        await engine.administer(Drain())
    assert (await reader.done()).reasons == ["cancelled"]
    assert verified(engine).clean_end


async def test_aborts_by_either_name(tmp_path: Path) -> None:
    async with running(record=tmp_path, fake=SLOW) as engine:
        readers = [await submit(engine, request(400), submission(f"cmpl-{number}")) for number in range(3)]
        for name in ("cmpl-0", str(readers[1].handle.request)):
            await engine.administer(Abort(request=name))
        for reader in readers[:2]:
            assert (await reader.done()).reasons == ["cancelled"]
        for name in ("cmpl-0", "cmpl-9", str(readers[1].handle.request), "0", "-1", "²", "9" * 30):
            with pytest.raises(UnknownRequestError, match="is under way"):
                await engine.administer(Abort(request=name))
        assert (await engine.administer(ReadStatus())).num_requests == 1
        readers[2].handle.cancel()
        await readers[2].done()
    assert [event.reason for event in recorded(engine) if isinstance(event, Cancelled)] == ["admin", "admin", "client"]


async def test_aborts_by_the_id_that_a_client_chose() -> None:
    async with running(fake=SLOW) as engine:

        async def begin(reply_id: str, owner: str, request_id: str) -> Reader:
            return await submit(engine, request(400), submission(reply_id, owner, request_id))

        async def is_aborted(name: str, reader: Reader) -> None:
            await engine.administer(Abort(request=name))
            finished = (await reader.done()).finished[0]
            assert finished is not None
            assert (finished.reason, finished.detail) == ("cancelled", "admin")

        await is_aborted("job-1", await begin("cmpl-0", "a", "job-1"))
        mine, others = await begin("cmpl-1", "a", "job-2"), await begin("cmpl-2", "b", "job-2")
        # A client that takes the id of another's reply, or its seq, ends no request by it.
        await begin("cmpl-3", "b", "cmpl-1")
        with pytest.raises(AmbiguousRequestError, match=r"2 replies have .* the id 'job-2'; .*: cmpl-1, cmpl-2$"):
            await engine.administer(Abort(request="job-2"))
        await is_aborted("cmpl-1", mine)
        await is_aborted("job-2", others)
        last = await begin("cmpl-4", "a", "")
        await begin("cmpl-5", "b", str(last.handle.request))
        # Its seq, which would be as ambiguous again, is not proposed.
        with pytest.raises(AmbiguousRequestError, match=r": cmpl-5, cmpl-4$"):
            await engine.administer(Abort(request=str(last.handle.request)))
        await is_aborted("cmpl-4", last)


async def test_aborts_all_requests_of_one_key_with_the_same_id_one_by_one() -> None:
    async with running(fake=SLOW) as engine:
        older, newer = [await submit(engine, request(400), submission(f"cmpl-{n}", "a", "job")) for n in range(2)]
        with pytest.raises(AmbiguousRequestError, match=r": cmpl-0, cmpl-1$"):
            await engine.administer(Abort(request="job"))
        await engine.administer(Abort(request="cmpl-1"))
        assert (await newer.done()).reasons == ["cancelled"]
        await engine.administer(Abort(request="job"))
        assert (await older.done()).reasons == ["cancelled"]
        with pytest.raises(UnknownRequestError):
            await engine.administer(Abort(request="job"))


async def test_an_id_that_is_the_seq_of_the_same_request_is_not_ambiguous() -> None:
    async with running(fake=SLOW) as engine:
        await engine.administer(Pause())
        seq = engine.bus.next_s
        reader = await submit(engine, request(4), submission("cmpl-0", "a", str(seq)))
        assert reader.handle.request == seq
        await engine.administer(Abort(request=str(seq)))
        assert (await reader.done()).reasons == ["cancelled"]


@pytest.mark.parametrize("action", [FlushCache(), SwapPolicy(name="fcfs"), Drain()])
async def test_an_engine_that_dies_of_an_action_does_not_answer_as_if_it_had_done_it(
    monkeypatch: pytest.MonkeyPatch, action: AdminAction
) -> None:
    async with running() as engine:
        await generate(engine, request(2, prompt=range(40)))

        def fail(engine_core: EngineCore, now_ns: int) -> None:
            raise RuntimeError

        monkeypatch.setattr(EngineCore, "drain", fail)
        with pytest.raises(EngineUnavailableError, match="the engine has died: a defect in it, RuntimeError"):
            await engine.administer(action)
        assert engine.state == "dead"


async def test_a_pause_reaches_watchers_of_the_state() -> None:
    async with running() as engine:
        told: list[bool] = []
        engine.on_state.append(lambda: told.append(engine.paused))
        await engine.administer(Pause())
        await engine.administer(Resume())
        assert told[:2] == [True, True]
        assert told[-1] is False


async def test_an_end_says_who_asked_for_it() -> None:
    async with running(fake=SLOW) as engine:
        readers = [await submit(engine, request(400), submission(f"cmpl-{number}")) for number in range(3)]
        assert await engine.cancel_reply("cmpl-0", "a")
        with pytest.raises(UnknownReplyError):
            await engine.cancel_reply("cmpl-0", "a")
        readers[1].handle.cancel()
        for reader in readers[:2]:
            await reader.done()
        for name in ("cmpl-0", str(readers[0].handle.request)):
            (sample,) = (await engine.status(name, None)).samples
            assert sample.row is not None
            assert (sample.state, sample.row.reason) == ("finished", "cancelled")
    await readers[2].done()
    ends = [reader.finished[0] for reader in readers]
    assert [end and end.detail for end in ends] == ["owner", "client", "shutdown"]


def test_a_policy_is_installed_once() -> None:
    with pytest.raises(UsageError, match="--extra-policy edf: this policy is installed already"):
        fake_setup(extra_policy=["edf", "lrs", "edf:multiplier=2"])
    with pytest.raises(UsageError, match="unknown policy 'efd'"):
        fake_setup(extra_policy=["efd"])


async def test_a_burst_is_counted_before_any_request_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as engine:
        # No time goes by in which what was taken comes back.
        now_ns = engine.now_ns()
        monkeypatch.setattr(engine, "now_ns", lambda: now_ns)
        limits = {"requests_per_minute": 5, "tokens_per_minute": 1000}
        results = await asyncio.gather(
            *(
                submit(engine, request(10, service_class="gold"), submission(str(number), **limits))
                for number in range(20)
            ),
            return_exceptions=True,
        )
        admitted = [each for each in results if isinstance(each, Reader)]
        refused = [each for each in results if isinstance(each, RateLimitError)]
        assert (len(admitted), len(refused)) == (5, 15)
        assert engine.metrics().rate_limited == {"gold": 15}
        with pytest.raises(RateLimitError):
            await engine.resume("0", "a", lambda place, output: None, RateLimits(**limits))
        assert engine.metrics().rate_limited == {"gold": 15, "": 1}
        state = admitted[-1].handle.rate_limits
        assert state is not None
        assert state.requests is not None
        assert state.requests.remaining == 0
        assert state.tokens is not None
        assert state.tokens.remaining == 1000 - 5 * 13
        for reader in admitted:
            await reader.done()
        # Somebody else is not bound by it, and neither is who has no limits.
        await (await submit(engine, request(10), submission(owner="b", **limits))).done()
        await (await submit(engine, request(10), submission())).done()


async def test_tokens_are_corrected_by_what_was_produced() -> None:
    async with running() as engine:
        limits = {"tokens_per_minute": 500, "concurrent_requests": 1}
        reader = await submit(engine, request(490, prompt=range(10)), submission(**limits))
        with pytest.raises(RateLimitError, match="at once"):
            await submit(engine, request(1), submission(**limits))
        await reader.until_tokens(2)
        reader.handle.cancel()
        await reader.done()
        assert reader.finished[0] is not None
        num_used = 10 + reader.finished[0].position
        after = await submit(engine, request(1, prompt=[1]), submission(**limits))
        assert after.handle.rate_limits is not None
        assert after.handle.rate_limits.tokens is not None
        # It fills by 8 tokens a second meanwhile.
        assert 500 - num_used - 2 <= after.handle.rate_limits.tokens.remaining < 500
        await after.done()


async def test_who_is_refused_by_the_queue_pays_nothing() -> None:
    async with running(fake=SLOW, max_queue_len=1, max_num_seqs=1) as engine:
        limits = {"requests_per_minute": 3, "concurrent_requests": 3}
        first = await submit(engine, request(400), submission(**limits))
        await first.until_tokens(1)
        second = await submit(engine, request(5), submission(**limits))
        for _ in range(9):
            with pytest.raises(QueueFullError):
                await submit(engine, request(5), submission(**limits))
        first.handle.cancel()
        await second.done()
        last = await submit(engine, request(5), submission(**limits))
        assert last.handle.rate_limits is not None
        assert isinstance(last.handle.rate_limits.requests, BucketState)
        assert last.handle.rate_limits.requests.remaining == 0


async def test_prefixes_are_shared_with_the_same_key_only() -> None:
    setup = fake_setup()
    config = structs.replace(setup.config, cache=CacheConfig(isolate_prefix_cache="key"))
    engine = InferenceEngine(structs.replace(setup, config=config), real_system())
    await engine.start()

    async def cached(owner: str, salt: str = "") -> int:
        reader = await submit(engine, request(2, prompt=range(50), cache_salt=salt), submission(owner=owner))
        await reader.done()
        assert reader.finished[0] is not None
        return reader.finished[0].cached_tokens

    try:
        assert [await cached(owner) for owner in ("a", "b", "a", "b")] == [0, 0, 48, 48]
        assert [await cached("a", salt) for salt in ("x", "x", "/x", "")] == [0, 48, 0, 48]
    finally:
        await engine.stop()


async def test_a_stopping_engine_cannot_be_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as engine:
        stop_workers = engine._replicas.stop

        async def resume_first() -> None:
            for action in (Resume(), Drain()):
                with pytest.raises(EngineUnavailableError, match="stop"):
                    await engine.administer(action)
            with pytest.raises(EngineUnavailableError, match="draining"):
                await engine.submit([request()])
            await stop_workers()

        monkeypatch.setattr(engine._replicas, "stop", resume_first)
