"""The closed loop, driven by hand: one tick a drain, and nothing is seen before it is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eventlm.bus.bus import Bus
from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriteError, LogWriter
from eventlm.bus.recorder import Recorder
from eventlm.core.core import Core
from eventlm.core.predictor import Predictor
from eventlm.engine.block_names import BlockNames
from eventlm.engine.engine_core import EngineCore
from eventlm.engine.live_requests import LiveRequests
from eventlm.engine.request import FinishedOutput, Request, TokensOutput
from eventlm.engine.setup import EngineSetup, make_header
from eventlm.errors import InvariantError
from eventlm.events import (
    Admitted,
    Arrived,
    Cancelled,
    Checkpoint,
    Emitted,
    End,
    Event,
    Fact,
    Finished,
    Header,
    Launched,
    Recovered,
    Rejected,
    StepCompleted,
    WorkerLost,
    WorkerUp,
)
from eventlm.events.codec import decode_body, encode_body
from eventlm.replay.simulate.clock import VirtualClock
from eventlm.system.system import real_system
from eventlm.worker.fake.runner import FakeRunner
from eventlm.worker.protocol import StepPayload, StepResult, WorkerReady
from tests.engine.engines import fake_setup, request

COEFFICIENTS = [1, 1, 1, 1, 1]


class Rig:
    """An engine core, one replica, a fake worker of epoch 1. order: what happened (ship, write, publish, see)."""

    def __init__(self, folder: Path | None = None, *, setup: EngineSetup | None = None, **settings: Any) -> None:
        self.setup = setup = setup or fake_setup()
        self.order: list[tuple[str, Any]] = []
        self.launches: list[Launched] = []
        self.payloads: list[StepPayload] = []
        self.runner = FakeRunner({}, epoch=1, block_size=setup.core.block_size, num_blocks=setup.core.num_blocks)
        self.admissions: list[tuple[Any, list[int]]] = []
        self.outputs: list[Any] = []
        self.writer = LogWriter(real_system(), folder, "run") if folder is not None else None
        if self.writer is not None:
            self._watch(self.writer)
        bus = Bus()
        bus.attach(lambda event: self.order.append(("publish", event.s)))
        core = Core(setup.core, setup.plugins, Predictor.from_coefficients(COEFFICIENTS))
        names = BlockNames(b"n" * 32, block_size=setup.core.block_size, capacity=100)
        live = LiveRequests(names, block_size=setup.core.block_size, seed_key=b"s", digest_key=b"d" * 32)
        header = make_header(setup, "run", 1, COEFFICIENTS, "config", WorkerReady(epoch=1, pid=1), unix_start_ns=0)
        recorder = Recorder(self.writer) if self.writer is not None else None
        self.broken: list[tuple[list[int], Exception]] = []
        self.engine_core = EngineCore(
            header,
            core,
            live,
            clock=VirtualClock(),
            bus=bus,
            ship=self._ship,
            on_broken=self._break,
            recorder=recorder,
            **settings,
        )

    def _watch(self, writer: LogWriter) -> None:
        flush = writer.flush

        def watched() -> None:
            flush()
            self.order.append(("write", writer.num_events))

        writer.flush = watched  # type: ignore[method-assign]

    def _ship(self, launched: Launched, body: bytes, payload: StepPayload) -> None:
        assert decode_body(body) == launched
        self.order.append(("ship", launched.s))
        self.launches.append(launched)
        self.payloads.append(payload)

    def _break(self, requests: list[int], error: Exception) -> None:
        self.broken.append((requests, error))
        for seq in requests:
            self.engine_core.put_fact(Cancelled(request=seq))

    def _see(self, output: Any) -> None:
        self.order.append(("see", output))
        self.outputs.append(output)

    def submit(self, *group: Request) -> None:
        self.engine_core.submit(
            [(member, self._see) for member in group], lambda reason, seqs: self.admissions.append((reason, seqs))
        )

    def complete(self, tokens: list[list[int]]) -> None:
        """The oldest launch that was not answered."""
        launched = self.launches.pop(0)
        self.payloads.pop(0)
        result = StepResult(epoch=launched.epoch, step=launched.step, start_ns=0, end_ns=0, tokens=tokens)
        self.engine_core.complete(0, result, start_ns=0, end_ns=0)

    def result(self) -> StepResult:
        """The fake worker's answer to the oldest launch that was not answered."""
        launched = self.launches.pop(0)
        step = self.runner.execute(launched, self.payloads.pop(0))
        return StepResult(
            epoch=launched.epoch,
            step=launched.step,
            start_ns=5,
            end_ns=6,
            tokens=step.tokens,
            ends=step.ends,
            extras=step.extras,
        )

    def answer(self, result: StepResult) -> None:
        self.engine_core.complete(0, result, start_ns=result.start_ns, end_ns=result.end_ns)

    def events(self) -> list[Event]:
        assert self.writer is not None
        with LogReader(self.writer.path) as lines:
            return [decode_body(line.body) for line in lines]


def kinds(events: Sequence[Event]) -> list[type[Event]]:
    return [type(event) for event in events]


def test_a_drain_is_one_tick_whose_last_fact_is_marked(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    engine_core = rig.engine_core
    engine_core.put_fact(WorkerUp(replica=0, epoch=1))
    rig.submit(request(1), request(1))
    rig.submit(request(1))
    engine_core.drain(1000)
    events = rig.events()
    assert isinstance(events[0], Header)
    assert [event.s for event in events] == list(range(len(events)))
    facts = [event for event in events if isinstance(event, Fact)]
    assert kinds(facts) == [WorkerUp, Arrived, Arrived, Arrived]
    assert [(fact.ts, fact.p) for fact in facts] == [(1000, 0), (1000, 0), (1000, 0), (1000, 1)]
    [launched] = [event for event in events if isinstance(event, Launched)]
    assert len(launched.chunks) == 3
    seqs = [fact.s for fact in facts[1:]]
    assert rig.admissions == [(None, seqs[:2]), (None, seqs[2:])]


def test_time_never_stands_still() -> None:
    rig = Rig()
    for _ in range(3):
        rig.engine_core.put_fact(WorkerUp(replica=0, epoch=1))
        rig.engine_core.drain(50)
    rig.engine_core.drain(5000)
    assert rig.engine_core.core.state.now_ns == 52


def test_launches_leave_at_once_and_clients_see_what_is_written(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.engine_core.put_fact(WorkerUp(replica=0, epoch=1))
    rig.submit(request(9))
    rig.engine_core.drain(10)
    rig.order.clear()
    rig.complete([[7]])
    rig.engine_core.drain(20)
    steps = [what for what, _ in rig.order]
    written, seen = steps.index("write"), steps.index("see")
    assert steps.index("ship") < written < steps.index("publish") < seen
    assert "publish" not in steps[seen:]
    assert rig.order[seen] == ("see", TokensOutput(0, 0, [7]))
    emitted = next(event for event in rig.events() if isinstance(event, Emitted))
    assert rig.order[written][1] > emitted.s


def test_a_request_from_its_arrival_to_its_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.engine_core.put_fact(WorkerUp(replica=0, epoch=1))
    rig.submit(request(3))
    now_ns = 0
    for token in (7, 8, 9):
        now_ns += 100
        rig.engine_core.drain(now_ns)
        rig.complete([[token]])
    rig.engine_core.drain(now_ns + 100)
    assert rig.outputs == [
        TokensOutput(0, 0, [7]),
        TokensOutput(0, 1, [8]),
        TokensOutput(0, 2, [9]),
        FinishedOutput(0, "length", 3, 0),
    ]
    assert len(rig.engine_core.live) == 0
    assert {Admitted, Launched, StepCompleted, Emitted, Finished} <= set(kinds(rig.events()))


def test_a_group_is_rejected_as_one() -> None:
    rig = Rig(setup=fake_setup(max_queue_len=1, max_num_seqs=2))
    rig.engine_core.put_fact(WorkerUp(replica=0, epoch=1))
    rig.submit(*(request(1) for _ in range(4)))
    rig.submit(request(1))
    rig.engine_core.drain(10)
    assert [(reason, len(seqs)) for reason, seqs in rig.admissions] == [("queue_full", 4), (None, 1)]
    assert len(rig.engine_core.live) == 1
    rig.submit(request(512))
    rig.engine_core.drain(20)
    assert rig.admissions[-1][0] == "context_length"


def test_the_results_of_a_lost_worker_mean_nothing() -> None:
    rig = Rig()
    rig.engine_core.put_fact(WorkerUp(replica=0, epoch=1))
    rig.submit(request(2))
    rig.engine_core.drain(10)
    rig.engine_core.put_fact(WorkerLost(replica=0, epoch=1))
    rig.engine_core.put_fact(WorkerUp(replica=0, epoch=2))
    rig.engine_core.drain(20)
    assert [launched.epoch for launched in rig.launches] == [1, 1, 2]
    rig.complete([[65]])
    rig.complete([[66]])
    rig.engine_core.drain(30)
    assert rig.outputs == []
    rig.complete([[7]])
    rig.engine_core.drain(40)
    assert rig.outputs == [TokensOutput(0, 0, [7])]


def test_an_engine_that_goes_on_has_no_workers_and_ships_all_again() -> None:
    rig = Rig()
    rig.engine_core.put_fact(WorkerUp(replica=0, epoch=1))
    rig.submit(request(2))
    rig.engine_core.drain(10)
    rig.engine_core.put_fact(Recovered(reason="killed"))
    rig.engine_core.drain(20)
    before = len(rig.launches)
    rig.complete([[65]])
    rig.engine_core.put_fact(WorkerUp(replica=0, epoch=2))
    rig.engine_core.drain(30)
    assert rig.outputs == []
    assert [len(payload.new) for payload in rig.payloads[before - 1 :]] == [1, 0]
    del rig.launches[: before - 1], rig.payloads[: before - 1]
    rig.complete([[7]])
    rig.engine_core.drain(40)
    assert rig.outputs == [TokensOutput(0, 0, [7])]


def test_facts_of_one_drain_act_in_their_order() -> None:
    rig = Rig()
    rig.engine_core.put_fact(WorkerUp(replica=0, epoch=1))
    rig.submit(request(9))
    rig.engine_core.drain(10)
    [(_, [seq])] = rig.admissions
    rig.complete([[7]])
    rig.engine_core.put_fact(Cancelled(request=seq))
    rig.engine_core.end_text(seq, 0, 1, "stop")
    rig.engine_core.drain(20)
    assert rig.outputs == [TokensOutput(0, 0, [7]), FinishedOutput(0, "cancelled", 1, 0, detail="client")]
    next_seq = rig.engine_core.core.next_seq
    rig.engine_core.end_text(seq, 0, 1, "stop")
    rig.engine_core.drain(30)
    assert rig.engine_core.core.next_seq == next_seq


def test_checkpoints_come_by_the_number_of_events_and_at_the_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path, checkpoint_events=5)
    for now_ns in range(1, 15):
        rig.engine_core.put_fact(WorkerUp(replica=0, epoch=1))
        rig.engine_core.drain(now_ns)
    rig.engine_core.end("stop")
    found = kinds(rig.events())
    assert found.count(Checkpoint) == 4
    assert found[-2:] == [Checkpoint, End]
    assert rig.engine_core.bus.closed
    rig.engine_core.close()


def test_what_was_applied_is_written_even_if_the_next_fact_is_wrong(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.engine_core.put_fact(WorkerUp(replica=0, epoch=1))
    rig.engine_core.put_fact(WorkerUp(replica=9, epoch=1))
    with pytest.raises(InvariantError):
        rig.engine_core.drain(10)
    assert kinds(rig.events())[:2] == [Header, WorkerUp]


def test_unwritten_events_have_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path)
    rig.engine_core.put_fact(WorkerUp(replica=0, epoch=1))
    rig.submit(request(9))
    rig.engine_core.drain(10)
    assert rig.writer is not None
    rig.order.clear()

    def fail() -> None:
        raise LogWriteError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(rig.writer, "flush", fail)
        rig.complete([[7]])
        with pytest.raises(LogWriteError):
            rig.engine_core.drain(20)
        assert [what for what, _ in rig.order] == ["ship"]
        with pytest.raises(LogWriteError):
            rig.engine_core.end("stop")
        assert rig.engine_core.bus.closed


def test_the_header_is_the_first_line_and_nothing_secret_is_in_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    [header] = rig.events()
    assert isinstance(header, Header)
    assert header.model_fingerprint == ""
    assert header.predictor == COEFFICIENTS
    assert b'"api_key":"***"' in encode_body(header) or b'"api_key":""' in encode_body(header)
    assert Rejected not in kinds(rig.events())
