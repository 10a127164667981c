"""A callback that raises costs its own request; the death of the engine reaches everybody all the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.request import EngineUnavailableError, Submission, TokensOutput
from eventlm.engine.request_registry import RequestRegistry
from eventlm.errors import EventLMError, InvariantError
from eventlm.events import Cancelled, Finished, WorkerUp
from eventlm.frontend.front_ends import FrontEndController
from tests.engine.engines import SLOW, Reader, expected_tokens, generate, recorded, request, running, verified
from tests.engine.test_engine_core import Rig
from tests.processes import PATIENCE_SECONDS


class Sink:
    """Keeps what it gets, and raises at the output with this number."""

    def __init__(self, fails_at: int = -1) -> None:
        self.got: list[Any] = []
        self.fails_at = fails_at

    def __call__(self, output: Any) -> None:
        self.got.append(output)
        if len(self.got) == self.fails_at:
            raise RuntimeError("broken")

    def take(self, index: int, output: Any) -> None:
        """As the sink of a group of one."""
        self(output)


def driven(*sinks: Sink) -> Rig:
    """An engine core with a request of three tokens for each of the sinks."""
    rig = Rig()
    rig.engine_core.put_fact(WorkerUp(replica=0, epoch=1))
    for sink in sinks:
        rig.engine_core.submit([(request(3), sink)], lambda reason, seqs: rig.admissions.append((reason, seqs)))
    rig.engine_core.drain(10)
    return rig


# --- the engine core


def test_a_sink_that_raises_gets_an_error_and_no_more_and_all_others_go_on() -> None:
    broken, sound = Sink(fails_at=1), Sink()
    rig = driven(broken, sound)
    for now_ns, token in enumerate((7, 8, 9), start=20):
        rig.complete([[token], [token]])
        rig.engine_core.drain(now_ns)
    [(seqs, error)] = rig.broken
    assert (seqs, str(error)) == (rig.admissions[0][1], "broken")
    first, second = broken.got
    assert (type(first), type(second)) == (TokensOutput, EngineUnavailableError)
    assert [output.token_ids for output in sound.got[:3]] == [[7], [8], [9]]
    assert sound.got[3].reason == "length"
    assert len(rig.engine_core.live) == 0


def test_a_sink_that_raises_at_the_error_too_is_called_no_more() -> None:
    class Always(Sink):
        def __call__(self, output: Any) -> None:
            super().__call__(output)
            raise RuntimeError("broken")

    broken = Always()
    rig = driven(broken)
    for now_ns in (20, 30, 40):
        rig.complete([[7]])
        rig.engine_core.drain(now_ns)
    assert len(rig.broken) == 1
    assert len(broken.got) == 2


def test_an_admission_that_raises_harms_no_other() -> None:
    rig = Rig()
    rig.engine_core.put_fact(WorkerUp(replica=0, epoch=1))

    def fail(reason: object, seqs: list[int]) -> None:
        raise RuntimeError("broken")

    rig.engine_core.submit([(request(3), Sink()), (request(3), Sink())], fail)
    rig.submit(request(3))
    rig.engine_core.drain(10)
    [(seqs, _)] = rig.broken
    assert len(seqs) == 2
    assert len(rig.admissions) == 1
    rig.engine_core.drain(20)
    assert len(rig.engine_core.live) == 1


def test_a_failure_reaches_every_request_whatever_their_sinks_do() -> None:
    sinks = [Sink(fails_at=1), Sink(), Sink(fails_at=1), Sink()]
    rig = driven(*sinks)
    error = EventLMError("over")
    rig.engine_core.fail(error)
    rig.engine_core.fail(error)
    assert [sink.got for sink in sinks] == [[error]] * 4


def test_a_failure_reaches_a_request_whose_last_output_could_not_be_written(tmp_path: Path) -> None:
    rig, sink = Rig(tmp_path), Sink()
    rig.engine_core.put_fact(WorkerUp(replica=0, epoch=1))
    rig.engine_core.submit([(request(1), sink)], lambda reason, seqs: None)
    rig.engine_core.drain(10)
    rig.complete([[7]])

    def fail() -> None:
        raise OSError("no disk")

    assert rig.writer is not None
    rig.writer.flush = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no disk"):
        rig.engine_core.drain(20)
    assert (len(rig.engine_core.live), sink.got) == (0, [])
    error = EventLMError("over")
    rig.engine_core.fail(error)
    assert sink.got == [error]


# --- the engine


async def test_a_raising_sink_cancels_its_request_is_logged_once_and_the_engine_serves_on(tmp_path: Path) -> None:
    broken = Sink(fails_at=2)
    with structlog.testing.capture_logs() as logs:
        async with running(record=tmp_path) as engine:
            await engine.submit([request(60)], on_output=broken.take)
            [reader] = await generate(engine, request(20, seed=3))
            assert reader.tokens == [expected_tokens(3, 0, 20)]
            assert engine.state == "ready"
    assert [type(output) for output in broken.got] == [TokensOutput, TokensOutput, EngineUnavailableError]
    errors = [entry for entry in logs if entry["log_level"] == "error"]
    assert len(errors) == 1
    events = recorded(engine)
    [cancelled] = [event for event in events if isinstance(event, Cancelled)]
    assert (errors[0]["requests"], cancelled.reason) == ([cancelled.request], "output_failed")
    assert {event.reason for event in events if isinstance(event, Finished)} == {"cancelled", "length"}
    verified(engine)


async def test_a_submission_whose_admission_raises_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: RequestRegistry, reply: object, requests: list[int]) -> None:
        raise RuntimeError("broken")

    async with running() as engine:
        monkeypatch.setattr(RequestRegistry, "add", fail)
        with pytest.raises(EngineUnavailableError, match="see the server's log"):
            await asyncio.wait_for(engine.submit([request(400)], submission=Submission(reply_id="r")), PATIENCE_SECONDS)
        [reader] = await generate(engine, request(5))
        assert reader.reasons == ["length"]
        assert engine.state == "ready"


def break_core(engine: InferenceEngine) -> None:
    """Break its core."""

    def fail(event: object) -> None:
        raise InvariantError("broken")

    engine._require_engine_core().core.apply = fail  # type: ignore[assignment, method-assign]


async def test_the_death_of_the_engine_reaches_every_request_every_submission_and_every_listener() -> None:
    async with running(fake=SLOW) as engine:
        sinks = [Sink(fails_at=1), Sink(), Sink(fails_at=1), Sink()]
        for sink in sinks:
            await engine.submit([request(400)], on_output=sink.take)
        readers = [Reader(handle) for handle in await engine.submit([request(400), request(400, n=2)])]
        states: list[str] = []

        def listen() -> None:
            states.append(engine.state)
            raise RuntimeError("broken")

        engine.on_state.append(listen)
        break_core(engine)
        for sink in sinks:
            sink.fails_at = len(sink.got) + 1 if sink.fails_at > 0 else -1
        pending = [asyncio.create_task(engine.submit([request(5)])) for _ in range(3)]
        async with asyncio.timeout(PATIENCE_SECONDS):
            for each in pending:
                with pytest.raises(EngineUnavailableError, match="broken"):
                    await each
            for reader in readers:
                with pytest.raises(EngineUnavailableError, match="broken"):
                    await reader.done()
        assert [type(sink.got[-1]) for sink in sinks] == [EngineUnavailableError] * 4
        assert states == ["dead"]
        with pytest.raises(EngineUnavailableError, match="broken"):
            await engine.submit([request(5)])


def test_a_front_end_that_cannot_be_sent_the_state_keeps_it_from_no_other() -> None:
    class FrontEndStub:
        index = 1

        def __init__(self, *, is_broken: bool) -> None:
            self.got: list[Any] = []
            self._is_broken = is_broken

        def send(self, message: Any) -> None:
            self.got.append(message.state)
            if self._is_broken:
                raise RuntimeError("broken")

    class EngineStub:
        state, paused, has_worker, max_model_len, num_waiting_for_room = "dead", False, False, 512, 0
        origin_ns = 0
        models: list[Any] = []

    controller = FrontEndController.__new__(FrontEndController)
    controller._engine = EngineStub()  # type: ignore[assignment]
    stubs = [FrontEndStub(is_broken=position != 1) for position in range(3)]
    controller._front_ends = stubs  # type: ignore[assignment]
    controller._send_state()
    assert [stub.got for stub in stubs] == [["dead"]] * 3
