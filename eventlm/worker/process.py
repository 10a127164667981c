"""A worker process: a blocking loop that takes launches, runs them and answers. Start it with

    python -m eventlm.worker.process INBOX OUTBOX PARENT_PID

INBOX and OUTBOX are ZMQ endpoints in a folder of their own; the worker binds the first, the engine the second. The main
thread computes; a second one sends heartbeats and leaves when the engine has died, so that no worker outlives its
engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn, Protocol

import zmq

from eventlm.errors import EventLMError
from eventlm.events import Launched
from eventlm.events.codec import decode_body
from eventlm.grammars import GrammarError
from eventlm.tracebacks import describe
from eventlm.worker.fake import FakeDeath, FakeParameters, FakeRunner
from eventlm.worker.protocol import (
    FAKE_MODEL,
    GrammarBuilt,
    Heartbeat,
    PrepareGrammar,
    Shutdown,
    StepOutput,
    StepPayload,
    StepResult,
    StepSample,
    WorkerDesync,
    WorkerFailed,
    WorkerReady,
    WorkerSetup,
    decode_to_worker,
    encode,
)
from eventlm.worker.sequence_table import DesyncError

#: How often a worker that waits for its setup looks whether the engine is alive; from then on each heartbeat does.
PARENT_POLL_MS = 500
#: A worker that has waited this long for a step does what can be done ahead.
IDLE_MS = 20
#: It waits so long again between two pieces of that: a thread may be at it, and must not be asked without a pause.
BETWEEN_MS = 1


class Runner(Protocol):
    """What computes steps."""

    def execute(self, launch: Launched, payload: StepPayload) -> StepOutput:
        """Compute every row of a launch. Raises DesyncError."""
        ...

    def prepare_grammar(self, grammar: str) -> Future[Any]:
        """Done when the grammar's matcher is built; raises GrammarError if that cannot be."""
        ...

    def warm_up(self) -> list[StepSample]:
        """Measured steps of several shapes, in at most 2 s."""
        ...

    def work_ahead(self) -> bool:
        """Called while no step is there: do for a moment what would cost later steps time. False if nothing is left."""
        ...

    def describe(self) -> tuple[str, dict[str, Any]]:
        """Fingerprint of the model, and what a trace says of the machinery."""
        ...


class FakeModel:
    """The fake worker in real time: it takes as long as it says, and dies when it is drawn to."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._profile_ops = setup.profile_ops
        self._runner = FakeRunner(
            setup.fake, epoch=setup.epoch, block_size=setup.block_size, num_blocks=setup.num_blocks
        )

    def execute(self, launch: Launched, payload: StepPayload) -> StepOutput:
        """Sleep for the step's duration."""
        try:
            step = self._runner.execute(launch, payload)
        except FakeDeath as death:
            print(f"fake worker: {death}", file=sys.stderr)
            os._exit(1)
        time.sleep(step.duration_ns / 1e9)
        return StepOutput(step.tokens, step.ends, step.extras, step.ops if self._profile_ops else {})

    def prepare_grammar(self, grammar: str) -> Future[Any]:
        """Over the fake model's bytes."""
        from eventlm.worker.fake_grammar import fake_compiler

        return fake_compiler().prepare(grammar)

    def warm_up(self) -> list[StepSample]:
        """The formula's own values at a few points."""
        return fake_samples(self._runner.parameters)

    def work_ahead(self) -> bool:
        """There is nothing to do."""
        return False

    def describe(self) -> tuple[str, dict[str, Any]]:
        """There is no model."""
        return FAKE_MODEL, {"device": "none"}


class CheckpointModel:
    """A checkpoint on a torch device. Imports torch, which takes a second."""

    def __init__(self, setup: WorkerSetup) -> None:
        from eventlm.models.config import model_fingerprint
        from eventlm.worker.model_runner import ModelRunner

        self._runner = ModelRunner(setup)
        self._fingerprint = model_fingerprint(setup.model)

    def execute(self, launch: Launched, payload: StepPayload) -> StepOutput:
        """Run the model."""
        return self._runner.execute(launch, payload)

    def prepare_grammar(self, grammar: str) -> Future[Any]:
        """Over the checkpoint's vocabulary."""
        return self._runner.compiler.prepare(grammar)

    def warm_up(self) -> list[StepSample]:
        """Time real steps."""
        from eventlm.worker.warm_up import warm_up

        return warm_up(self._runner)

    def work_ahead(self) -> bool:
        """Have memory given."""
        return self._runner.work_ahead()

    def describe(self) -> tuple[str, dict[str, Any]]:
        """Fingerprint and host."""
        return self._fingerprint, self._runner.host_info()


def fake_samples(parameters: FakeParameters) -> list[StepSample]:
    """What a warm-up of the fake worker would measure."""
    shapes = [(1, 0, 1), (256, 0, 256), (0, 1, 64), (0, 64, 64), (0, 64, 65_536), (1024, 0, 1024)]
    return [
        StepSample(
            prefill_tokens=prefill,
            num_decodes=decodes,
            context_tokens=context,
            chunk_context=prefill * (prefill // 2),
            duration_ns=parameters.base_ns
            + parameters.prefill_token_ns * prefill
            + parameters.decode_ns * decodes
            + parameters.context_token_ns * context,
        )
        for prefill, decodes, context in shapes
    ]


class Worker:
    """The loop of one worker process."""

    def __init__(self, inbox: str, outbox: str, parent_pid: int) -> None:
        self._context = zmq.Context()
        self._addresses = (inbox, outbox)
        self._parent_pid = parent_pid
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind(inbox)
        self._outbox = self._push()
        #: Sockets are for one thread at a time; grammars are answered from several.
        self._grammar_outbox = self._push()
        self._grammar_lock = threading.Lock()
        #: Start of the step that is running, 0 between steps; read by the heartbeat's thread.
        self._busy_since_ns = 0

    def _push(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.set(zmq.LINGER, 1000)
        socket.connect(self._addresses[1])
        return socket

    def run(self) -> int:
        """Serve until told to stop; the exit status."""
        while not self._inbox.poll(PARENT_POLL_MS):
            if os.getppid() != self._parent_pid:
                self._leave_orphaned()
        setup = decode_to_worker(self._inbox.recv())
        assert isinstance(setup, WorkerSetup)
        threading.Thread(target=self._beat, args=(setup,), daemon=True).start()
        runner = self._load(setup)
        if runner is None:
            return 1
        while True:
            frames = self._receive(runner)
            if len(frames) == 1:
                message = decode_to_worker(frames[0])
                if isinstance(message, Shutdown):
                    return 0
                assert isinstance(message, PrepareGrammar)
                self._prepare_grammar(runner, message)
                continue
            if not self._step(setup.epoch, runner, frames):
                return 1

    def _receive(self, runner: Runner) -> list[bytes]:
        """The next message. A worker that waits for one does meanwhile what can be done ahead."""
        if not self._inbox.poll(IDLE_MS):
            while runner.work_ahead() and not self._inbox.poll(BETWEEN_MS):
                pass
        return self._inbox.recv_multipart()

    def _load(self, setup: WorkerSetup) -> Runner | None:
        try:
            runner: Runner = FakeModel(setup) if setup.model == FAKE_MODEL else CheckpointModel(setup)
            samples = runner.warm_up() if setup.warm_up else []
            fingerprint, host = runner.describe()
        except EventLMError as error:
            self._send(WorkerFailed(epoch=setup.epoch, message=str(error), user_error=True))
            return None
        except Exception as error:
            # There is nothing of a client's yet that the error could quote.
            message = f"{type(error).__name__}: {error}"
            self._send(WorkerFailed(epoch=setup.epoch, message=message, traceback=traceback.format_exc()))
            return None
        self._send(
            WorkerReady(epoch=setup.epoch, pid=os.getpid(), model_fingerprint=fingerprint, host=host, samples=samples)
        )
        return runner

    def _prepare_grammar(self, runner: Runner, message: PrepareGrammar) -> None:
        """Steps go on while it is built."""

        def answer(built: Future[Any]) -> None:
            # In the thread that built it, or in this one if it is there already.
            error = built.exception()
            if error is not None and not isinstance(error, GrammarError):
                # A defect, or a tokenizer that cannot be read: what it says may quote the grammar.
                error = GrammarError(f"its matcher could not be made, {type(error).__name__}")
            with self._grammar_lock:
                self._grammar_outbox.send(encode(GrammarBuilt(key=message.key, error=str(error) if error else "")))

        runner.prepare_grammar(message.grammar).add_done_callback(answer)

    def _step(self, epoch: int, runner: Runner, frames: list[bytes]) -> bool:
        """Run one launch and answer; False if this worker must not go on."""
        launch, payload = decode_body(frames[0]), decode_to_worker(frames[1])
        assert isinstance(launch, Launched)
        assert isinstance(payload, StepPayload)
        start_ns = self._busy_since_ns = time.monotonic_ns()
        try:
            output = runner.execute(launch, payload)
        except DesyncError as error:
            self._send(WorkerDesync(epoch=epoch, step=launch.step, detail=error.detail))
            return False
        except Exception as error:
            # A defect, not a user's mistake: where it is belongs into the engine's log.
            self._send(WorkerFailed(epoch=epoch, message=type(error).__name__, traceback=describe(error)))
            return False
        self._busy_since_ns = 0
        end_ns = time.monotonic_ns()
        self._send(StepResult(epoch=epoch, step=launch.step, start_ns=start_ns, end_ns=end_ns, **output._asdict()))
        return True

    def _send(self, message: Any) -> None:
        self._outbox.send(encode(message))

    def _beat(self, setup: WorkerSetup) -> None:
        """Runs in a thread of its own, with a socket of its own."""
        socket = self._push()
        while os.getppid() == self._parent_pid:
            since = self._busy_since_ns
            socket.send(encode(Heartbeat(epoch=setup.epoch, busy_ns=time.monotonic_ns() - since if since else 0)))
            time.sleep(setup.heartbeat_ns / 1e9)
        self._leave_orphaned()

    def _leave_orphaned(self) -> NoReturn:
        """The engine has died and cannot tidy up: its sockets, and the folder that it made for them, go too."""
        paths = [Path(address.removeprefix("ipc://")) for address in self._addresses]
        with contextlib.suppress(OSError):
            for path in paths:
                path.unlink(missing_ok=True)
            paths[0].parent.rmdir()
        os._exit(1)


def main() -> int:
    """Entry point of the process."""
    # Some of those who stop an engine send the signal to all of its processes; it decides when its workers leave.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return Worker(sys.argv[1], sys.argv[2], int(sys.argv[3])).run()


if __name__ == "__main__":
    sys.exit(main())
