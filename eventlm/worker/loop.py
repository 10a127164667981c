"""What a worker does with its messages, without I/O: messages come in, and those for the engine go out."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

from msgspec import structs

from eventlm._version import __version__
from eventlm.errors import EventLMError
from eventlm.events import Launched
from eventlm.events.codec import decode_body
from eventlm.grammars import GrammarError
from eventlm.system.clock import Clock
from eventlm.system.collector import lasting_objects
from eventlm.system.system import System
from eventlm.tracebacks import describe
from eventlm.types import SequenceId
from eventlm.worker.fake.model import FakeModel
from eventlm.worker.protocol import (
    FAKE_MODEL,
    FromWorker,
    GrammarBuilt,
    PrepareGrammar,
    Shutdown,
    StepPayload,
    StepResult,
    WorkerDesync,
    WorkerFailed,
    WorkerReady,
    WorkerSetup,
    decode_to_worker,
)
from eventlm.worker.runner import PeerLostError, Runner, StepUnderWay
from eventlm.worker.sequence_table import DesyncError
from eventlm.worker.start_report import LOADING_LIBRARIES, OnPhase, StartReport


class LoadedRunner(NamedTuple):
    """A runner, and what the engine is to get. Without a runner, the worker must end."""

    runner: Runner | None
    message: WorkerReady | WorkerFailed


def _make_runner(setup: WorkerSetup, system: System, report: StartReport) -> Runner:
    """For the model that is asked for. Raises EventLMError if it cannot be loaded."""
    if setup.model == FAKE_MODEL:
        return FakeModel(setup, system)
    report.begin(LOADING_LIBRARIES)
    # Torch takes a second to import, and the fake model needs none.
    if setup.device == "cpu":
        with lasting_objects():
            from eventlm.worker.model_runner import ModelRunner

        return ModelRunner(setup, report)
    with lasting_objects():
        from eventlm.worker.gpu.rank_runner import GpuRankRunner
        from eventlm.worker.gpu.runner import GpuRunner

    return (GpuRankRunner if setup.layout.num_ranks > 1 else GpuRunner)(setup, report)


class BegunStep(NamedTuple):
    """A launch under way."""

    number: int
    step: StepUnderWay


def load(setup: WorkerSetup, system: System, on_phase: OnPhase) -> LoadedRunner:
    """Make the runner, which may take minutes, and measure steps if the setup says so."""
    try:
        runner = _make_runner(setup, system, StartReport(on_phase))
        samples = runner.warm_up() if setup.warm_up else []
        fingerprint, host = runner.describe()
    except PeerLostError as error:
        return LoadedRunner(None, WorkerFailed(epoch=setup.epoch, message=str(error), lost_peer=True))
    except EventLMError as error:
        return LoadedRunner(None, WorkerFailed(epoch=setup.epoch, message=str(error), exit_code=error.exit_code))
    except Exception as error:
        # No client's data has arrived yet that the error could quote.
        message = f"{type(error).__name__}: {error}"
        failed = WorkerFailed(epoch=setup.epoch, message=message, traceback=traceback.format_exc())
        return LoadedRunner(None, failed)
    ready = WorkerReady(
        epoch=setup.epoch,
        pid=system.processes.pid,
        version=__version__,
        num_blocks=runner.num_blocks,
        notes=runner.notes,
        model_fingerprint=fingerprint,
        host=host,
        samples=samples,
    )
    return LoadedRunner(runner, ready)


class WorkerLoop:
    """Takes messages with `take`, and `answer`s the oldest step under way once it is done. Neither waits.

    exit_status: set when the worker must end; then nothing more may be taken. busy_since_ns: since when the oldest step
    under way has been the oldest, 0 between steps; may be read in any thread. ready: what the worker has reported; it
    serves that epoch until another engine takes it over. send_grammar: takes what became of a grammar, in any thread.
    answers: whether results are wanted; the engine takes them from one rank of a replica. hold_step: called with each
    step that the worker has in hand from then on, and with -1 when it has none. engine_pid: the process of the engine
    that has taken the worker over; 0: none has.
    """

    def __init__(
        self,
        ready: WorkerReady,
        runner: Runner,
        clock: Clock,
        send_grammar: Callable[[GrammarBuilt], None],
        *,
        answers: bool = True,
        hold_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.exit_status: int | None = None
        self.engine_pid = 0
        self.busy_since_ns = 0
        self._answers = answers
        self._hold_step = hold_step
        self._ready = ready
        self._runner = runner
        self._clock = clock
        self._send_grammar = send_grammar
        #: The sequences that the runner holds.
        self._held = set[SequenceId]()
        #: In the order of their launches.
        self._under_way: deque[BegunStep] = deque()
        #: Follows the answers of what is under way. No other step begins before that.
        self._desynced: WorkerDesync | None = None

    @property
    def epoch(self) -> int:
        """The one that it serves."""
        return self._ready.epoch

    @property
    def has_steps(self) -> bool:
        """Whether steps are under way."""
        return bool(self._under_way)

    def is_running(self) -> bool:
        """Whether the oldest step under way has neither ended nor failed."""
        try:
            return not self._under_way[0].step.is_done()
        except Exception:
            # `answer` meets it again, and reports it.
            return False

    @property
    def due_ns(self) -> int:
        """Until when at least the oldest step under way is running; 0: that is not known."""
        return self._under_way[0].step.due_ns

    def take(self, frames: list[bytes]) -> Iterator[FromWorker]:
        """Take a message: begin a step, prepare a grammar, or end."""
        if len(frames) > 1:
            if self._desynced is None:
                yield from self._start(frames)
            return
        message = decode_to_worker(frames[0])
        if isinstance(message, Shutdown):
            self.exit_status = 0
        elif isinstance(message, WorkerSetup):
            self.engine_pid = message.engine_pid
            yield self._renew(message)
        else:
            assert isinstance(message, PrepareGrammar)
            self._prepare_grammar(message)

    def _renew(self, setup: WorkerSetup) -> FromWorker:
        """Another engine takes the worker over, which forgets all sequences and keeps its weights."""
        epoch = setup.epoch
        self._ready = structs.replace(self._ready, epoch=epoch, samples=[])
        try:
            while self._under_way:
                self._under_way.popleft().step.finish()
            if self._desynced is not None:
                raise DesyncError(self._desynced.detail)
            launch = Launched(replica=0, epoch=epoch, step=-1, forget=sorted(self._held), num_tokens=0, predicted_ns=0)
            self._runner.start(launch, StepPayload()).finish()
            if setup.warm_up:
                self._ready = structs.replace(self._ready, samples=self._runner.warm_up())
        except Exception as error:
            return self._fail(error, -1)
        self._held.clear()
        self.busy_since_ns = 0
        self._hold_step(-1)
        return self._ready

    def _start(self, frames: list[bytes]) -> Iterator[FromWorker]:
        launch, payload = decode_body(frames[0]), decode_to_worker(frames[1])
        assert isinstance(launch, Launched)
        assert isinstance(payload, StepPayload)
        if launch.epoch != self.epoch:
            # Of an engine that has died.
            return
        self._held.difference_update(SequenceId(*pair) for pair in launch.forget)
        self._held.update(SequenceId(new.request, new.index) for new in payload.new)
        self.busy_since_ns = self.busy_since_ns or self._clock.monotonic_ns()
        self._hold_step(launch.step)
        try:
            step = self._runner.start(launch, payload)
        except DesyncError as error:
            self._desynced = WorkerDesync(epoch=self.epoch, step=launch.step, detail=str(error))
            if self._under_way:
                # They are valid.
                self._hold_step(self._under_way[0].number)
            else:
                self.exit_status = 1
                yield self._desynced
        except Exception as error:
            yield self._fail(error, launch.step)
        else:
            self._under_way.append(BegunStep(launch.step, step))
            self._hold_step(self._under_way[0].number)

    def answer(self) -> Iterator[FromWorker]:
        """The oldest step under way, which is done: its result if that is wanted, or how it failed."""
        number, step = self._under_way.popleft()
        # What it has waited for, others have computed.
        self.busy_since_ns = self._clock.monotonic_ns()
        try:
            output = step.finish()
            start_ns, end_ns = step.times_ns
        except DesyncError as error:
            # Found late, where a step begins only when another rank has given what it needs.
            self.exit_status = 1
            yield WorkerDesync(epoch=self.epoch, step=number, detail=str(error))
            return
        except Exception as error:
            yield self._fail(error, number)
            return
        # The next one has waited for this one, which is no sign that it hangs.
        self.busy_since_ns = self._clock.monotonic_ns() if self._under_way else 0
        self._hold_step(self._under_way[0].number if self._under_way else -1)
        if self._answers:
            yield StepResult(epoch=self.epoch, step=number, start_ns=start_ns, end_ns=end_ns, **output._asdict())
        if self._desynced is not None and not self._under_way:
            self.exit_status = 1
            yield self._desynced

    def _fail(self, error: Exception, step: int) -> WorkerFailed:
        self.exit_status = 1
        # Messages of errors that are not the program's own may quote a client's request. The traceback is for the log.
        message = str(error) if isinstance(error, EventLMError) else type(error).__name__
        return WorkerFailed(
            epoch=self.epoch,
            message=message,
            traceback=describe(error),
            lost_peer=isinstance(error, PeerLostError),
            step=step,
        )

    def _prepare_grammar(self, message: PrepareGrammar) -> None:
        """Steps go on while it is built."""
        epoch = self.epoch

        def answer(built: Future[Any]) -> None:
            # In the thread that built it, or in this one if it is there already.
            error = built.exception()
            if error is not None and not isinstance(error, GrammarError):
                # A defect, or a tokenizer that cannot be read: its message may quote the grammar.
                error = GrammarError(f"its matcher could not be made, {type(error).__name__}")
            self._send_grammar(GrammarBuilt(epoch=epoch, key=message.key, error=str(error) if error else ""))

        self._runner.prepare_grammar(message.grammar).add_done_callback(answer)
