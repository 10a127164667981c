"""The worker's loop in memory: messages in, messages out."""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import Any, NamedTuple

import pytest
from msgspec import structs

from eventlm.errors import EventLMError, ExitCode
from eventlm.events import Launched
from eventlm.events.codec import encode_body
from eventlm.grammars import GrammarError
from eventlm.sampling_params import SamplingParams
from eventlm.system.system import real_system
from eventlm.worker.fake.model import FakeModel, fake_samples
from eventlm.worker.fake.tokens import FakeParameters
from eventlm.worker.loop import WorkerLoop, load
from eventlm.worker.protocol import (
    FromWorker,
    GrammarBuilt,
    NewSequence,
    PrepareGrammar,
    Shutdown,
    StepOutput,
    StepPayload,
    StepResult,
    WorkerDesync,
    WorkerFailed,
    WorkerReady,
    WorkerSetup,
    encode,
)
from eventlm.worker.runner import PeerLostError
from eventlm.worker.sequence_table import DesyncError
from tests.worker.launches import launched, payload

SYSTEM = real_system()
FAKE = {"base_ns": 300, "decode_ns": 0, "prefill_token_ns": 0, "context_token_ns": 0}
SETUP = WorkerSetup(
    replica=0,
    epoch=1,
    model="fake",
    block_size=16,
    num_blocks=64,
    max_model_len=512,
    max_num_batched_tokens=512,
    max_num_seqs=8,
    fake=FAKE,
)


class Step(NamedTuple):
    """Of a `Device`."""

    number: int
    device: Device

    def is_done(self) -> bool:
        if self.number in self.device.broken:
            raise self.device.broken[self.number]
        return self.number < self.device.num_done

    def finish(self) -> StepOutput:
        if self.number in self.device.broken:
            raise self.device.broken[self.number]
        return StepOutput([[self.number]], [], [], {})

    @property
    def due_ns(self) -> int:
        return 10 * self.number + 5

    @property
    def times_ns(self) -> tuple[int, int]:
        return (10 * self.number, 10 * self.number + 5)


class Device(FakeModel):
    """A runner whose steps end, and fail, when the test says so."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.forgotten: list[tuple[int, int]] = []
        self.num_done = 0
        self.broken: dict[int, Exception] = {}
        self.desynced = -2
        self.building: dict[str, Future[Any]] = {}

    def start(self, launch: Launched, payload: StepPayload) -> Any:
        if launch.step == self.desynced:
            raise DesyncError("they differ")
        self.begun.append(launch.step)
        self.forgotten += launch.forget
        return Step(launch.step, self)

    def prepare_grammar(self, grammar: str) -> Future[Any]:
        return self.building.setdefault(grammar, Future())


class Rig:
    """A loop with its device and its clock."""

    def __init__(self, *, answers: bool = True) -> None:
        self.now_ns = 1000
        self.device = Device()
        self.grammars: list[GrammarBuilt] = []
        self.held: list[int] = []
        self.loop = WorkerLoop(
            WorkerReady(epoch=1, pid=1),
            self.device,
            self,
            self.grammars.append,
            answers=answers,
            hold_step=self.held.append,
        )

    def monotonic_ns(self) -> int:
        return self.now_ns

    def unix_ns(self) -> int:
        raise NotImplementedError

    def launch(self, step: int) -> list[FromWorker]:
        return list(self.loop.take([encode_body(launched(step)), encode(payload())]))

    def take(self, message: Any) -> list[FromWorker]:
        return list(self.loop.take([encode(message)]))


def result(step: int) -> StepResult:
    return StepResult(
        epoch=1, step=step, tokens=[[step]], ends=[], extras=[], ops={}, start_ns=10 * step, end_ns=10 * step + 5
    )


def test_a_step_is_begun_while_another_is_under_way_and_answered_once_done() -> None:
    rig = Rig()
    assert not rig.loop.has_steps
    assert rig.launch(0) == rig.launch(1) == []
    assert rig.device.begun == [0, 1]
    assert rig.loop.has_steps
    assert rig.loop.due_ns == 5
    assert rig.loop.is_running()
    rig.device.num_done = 1
    assert not rig.loop.is_running()
    assert list(rig.loop.answer()) == [result(0)]
    assert rig.loop.is_running()
    assert list(rig.loop.answer()) == [result(1)]
    assert not rig.loop.has_steps
    assert rig.loop.exit_status is None


def test_a_step_that_begins_late_may_find_a_desync_then() -> None:
    rig = Rig()
    rig.launch(0)
    rig.device.broken[0] = DesyncError("they differ")
    assert not rig.loop.is_running()
    assert list(rig.loop.answer()) == [WorkerDesync(epoch=1, step=0, detail="they differ")]
    assert rig.loop.exit_status == 1


def test_it_is_busy_since_the_oldest_step_was_the_oldest() -> None:
    rig = Rig()
    busy = [rig.loop.busy_since_ns]
    for action in (rig.launch, rig.launch, None, None):
        rig.now_ns += 1000
        if action is not None:
            action(rig.now_ns)
        else:
            list(rig.loop.answer())
        busy.append(rig.loop.busy_since_ns)
    assert busy == [0, 2000, 2000, 4000, 0]


def test_steps_before_a_desync_are_answered_first() -> None:
    rig = Rig()
    rig.device.desynced = 2
    rig.launch(0)
    rig.launch(1)
    assert rig.launch(2) == []
    assert rig.held[-1] == 0
    assert list(rig.loop.answer()) == [result(0)]
    # Nothing is begun any more.
    assert rig.launch(3) == []
    assert rig.loop.exit_status is None
    assert list(rig.loop.answer()) == [result(1), WorkerDesync(epoch=1, step=2, detail="they differ")]
    assert rig.device.begun == [0, 1]
    assert rig.loop.exit_status == 1


def test_a_worker_with_steps_before_a_desync_can_be_told_to_leave() -> None:
    rig = Rig()
    rig.device.desynced = 1
    rig.launch(0)
    rig.launch(1)
    assert rig.take(Shutdown()) == []
    assert rig.loop.exit_status == 0


def test_a_failed_step_before_a_desync_is_the_only_report() -> None:
    rig = Rig()
    rig.device.desynced = 2
    rig.device.broken[1] = EventLMError("no more memory")
    rig.launch(0)
    rig.launch(1)
    assert rig.launch(2) == []
    assert list(rig.loop.answer()) == [result(0)]
    [failed] = rig.loop.answer()
    assert isinstance(failed, WorkerFailed)
    assert failed.message == "no more memory"
    assert rig.loop.exit_status == 1


@pytest.mark.parametrize(
    ("error", "message"), [(EventLMError("no more memory"), "no more memory"), (ValueError("a prompt"), "ValueError")]
)
def test_a_step_that_fails_ends_the_worker_and_quotes_no_content(error: Exception, message: str) -> None:
    rig = Rig()
    rig.device.broken[0] = error
    rig.launch(0)
    assert not rig.loop.is_running()
    [failed] = rig.loop.answer()
    assert isinstance(failed, WorkerFailed)
    assert (failed.epoch, failed.message, failed.exit_code) == (1, message, 0)
    assert "in finish" in failed.traceback
    assert "a prompt" not in failed.traceback
    assert rig.loop.exit_status == 1


def test_a_step_that_cannot_begin_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    monkeypatch.setattr(Device, "start", lambda *_: 1 // 0)
    (failed,) = rig.launch(0)
    assert isinstance(failed, WorkerFailed)
    assert failed.message == "ZeroDivisionError"
    assert rig.loop.exit_status == 1


def test_it_ends_when_asked() -> None:
    rig = Rig()
    assert rig.take(Shutdown()) == []
    assert rig.loop.exit_status == 0


def test_grammars_are_answered_when_they_are_built() -> None:
    rig = Rig()
    errors = [None, GrammarError("no such rule"), ValueError("a grammar")]
    for key in range(3):
        assert rig.take(PrepareGrammar(key=key, grammar=str(key))) == []
    assert rig.grammars == []
    for key, error in reversed(list(enumerate(errors))):
        built = rig.device.building[str(key)]
        built.set_exception(error) if error is not None else built.set_result(None)
    assert rig.grammars == [
        GrammarBuilt(epoch=1, key=2, error="its matcher could not be made, ValueError"),
        GrammarBuilt(epoch=1, key=1, error="no such rule"),
        GrammarBuilt(epoch=1, key=0, error=""),
    ]


def no_phase(phase: str, done: int, total: int) -> None:
    pass


@pytest.mark.parametrize("warm_up", [True, False])
def test_a_loaded_runner_is_described(warm_up: bool) -> None:
    runner, ready = load(WorkerSetup(**{**_fields(), "warm_up": warm_up}), SYSTEM, no_phase)
    assert isinstance(runner, FakeModel)
    assert isinstance(ready, WorkerReady)
    assert (ready.epoch, ready.pid, ready.num_blocks, ready.model_fingerprint) == (1, os.getpid(), 64, "fake")
    assert ready.samples == (fake_samples(FakeParameters(**FAKE)) if warm_up else [])


def test_a_model_that_is_missing_and_a_defect_are_distinguished() -> None:
    runner, failed = load(WorkerSetup(**{**_fields(), "model": "/none"}), SYSTEM, no_phase)
    assert runner is None
    assert isinstance(failed, WorkerFailed)
    assert (failed.exit_code, failed.traceback) == (ExitCode.USAGE, "")
    runner, failed = load(WorkerSetup(**{**_fields(), "fake": {"speed": 3}}), SYSTEM, no_phase)
    assert runner is None
    assert isinstance(failed, WorkerFailed)
    assert (failed.exit_code, failed.message[:11]) == (0, "TypeError: ")
    assert failed.traceback.startswith("Traceback")


def _fields() -> dict[str, Any]:
    return {name: getattr(SETUP, name) for name in SETUP.__struct_fields__}


def test_a_rank_that_does_not_answer_says_only_how_it_fails() -> None:
    rig = Rig(answers=False)
    rig.device.num_done = 1
    rig.launch(0)
    rig.launch(1)
    assert list(rig.loop.answer()) == []
    rig.device.broken[1] = PeerLostError("a connection was closed")
    [failed] = rig.loop.answer()
    assert isinstance(failed, WorkerFailed)
    assert (failed.message, failed.lost_peer, failed.step) == ("a connection was closed", True, 1)


def test_the_step_in_hand_is_the_oldest_and_while_one_begins_that_one() -> None:
    rig = Rig()
    rig.launch(0)
    rig.launch(1)
    list(rig.loop.answer())
    list(rig.loop.answer())
    assert rig.held == [0, 0, 1, 0, 1, -1]
    rig.device.desynced = 2
    rig.launch(2)
    assert rig.held[-1] == 2


def test_a_rank_that_loses_a_peer_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FakeModel) -> None:
        raise PeerLostError("another rank is gone")

    monkeypatch.setattr(FakeModel, "describe", fail)
    _, failed = load(SETUP, SYSTEM, no_phase)
    assert failed == WorkerFailed(epoch=1, message="another rank is gone", lost_peer=True)


def test_another_engine_takes_the_worker_over() -> None:
    rig = Rig()
    new = NewSequence(request=4, index=0, token_ids=[1], num_prompt_tokens=1, params=SamplingParams())
    assert list(rig.loop.take([encode_body(launched(0)), encode(StepPayload(new=[new]))])) == []
    assert rig.loop.has_steps
    assert rig.take(structs.replace(SETUP, epoch=4, engine_pid=7, warm_up=False)) == [WorkerReady(epoch=4, pid=1)]
    assert (rig.loop.engine_pid, rig.loop.has_steps, rig.loop.busy_since_ns) == (7, False, 0)
    assert rig.device.forgotten == [(4, 0)]
    # A step that the engine before had launched.
    assert rig.launch(1) == []
    assert not rig.loop.has_steps


def test_a_worker_that_cannot_forget_is_not_taken_over() -> None:
    rig = Rig()
    rig.launch(0)
    rig.device.broken[0] = ValueError("as planned")
    [failed] = rig.take(structs.replace(SETUP, epoch=4, warm_up=False))
    assert isinstance(failed, WorkerFailed)
    assert (failed.epoch, rig.loop.exit_status) == (4, 1)
