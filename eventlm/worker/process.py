"""A worker process: a blocking loop that takes launches, runs them and answers. Start it with

    python -m eventlm.worker.process INBOX OUTBOX PARENT_PID

INBOX and OUTBOX are ZMQ endpoints in a folder of their own; the worker binds the first, the engine the second. The main
thread computes; a second one sends heartbeats and leaves when the engine has died, so that no worker outlives its
engine.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import zmq

from eventlm.errors import EventLMError
from eventlm.events import Launched
from eventlm.events.codec import decode_body
from eventlm.grammars import GrammarError
from eventlm.tracebacks import describe
from eventlm.worker.protocol import (
    GrammarBuilt,
    Heartbeat,
    PrepareGrammar,
    Shutdown,
    StartProgress,
    StepPayload,
    StepResult,
    WorkerDesync,
    WorkerFailed,
    WorkerReady,
    WorkerSetup,
    decode_to_worker,
    encode,
)
from eventlm.worker.runner import Runner, StepUnderWay
from eventlm.worker.runners import make_runner
from eventlm.worker.sequence_table import DesyncError
from eventlm.worker.start_report import StartReport

#: How often a worker that waits for its setup looks whether the engine is alive; from then on each heartbeat does.
PARENT_POLL_MS = 500
#: How long a worker that ends tries to get rid of what it has said.
LINGER_MS = 1000
#: A worker that has waited this long for a step does what can be done ahead.
IDLE_MS = 20
#: How often it looks whether the device is done, while a step is under way.
STEP_POLL_S = 50e-6
#: It waits so long again between two pieces of that: a thread may be at it, and must not be asked without a pause.
BETWEEN_MS = 1


class BegunStep(NamedTuple):
    """The number of a launch under way, and what will come of it."""

    number: int
    step: StepUnderWay


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
        self._is_over = threading.Event()
        #: In the order of their launches.
        self._under_way: deque[BegunStep] = deque()
        #: Since when the oldest step under way has been the oldest, 0 between steps; read by the heartbeat's thread.
        self._busy_since_ns = 0

    def _push(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.set(zmq.LINGER, LINGER_MS)
        socket.connect(self._addresses[1])
        return socket

    def run(self) -> int:
        """Serve until told to stop; the exit status."""
        while not self._inbox.poll(PARENT_POLL_MS):
            if os.getppid() != self._parent_pid:
                self._leave_orphaned()
        setup = decode_to_worker(self._inbox.recv())
        assert isinstance(setup, WorkerSetup)
        heart = threading.Thread(target=self._beat, args=(setup,), daemon=True)
        heart.start()
        runner = self._load(setup)
        status = 1 if runner is None else self._serve(setup.epoch, runner)
        self._is_over.set()
        heart.join(LINGER_MS / 1000)
        if not heart.is_alive():
            self._close()
        return status

    def _close(self) -> None:
        """Wait until the last words are sent: a process that ends takes along what its sockets still hold."""
        with self._grammar_lock:
            self._grammar_outbox.close()
        self._inbox.close()
        self._outbox.close()
        self._context.term()

    def _serve(self, epoch: int, runner: Runner) -> int:
        while True:
            frames = self._receive(runner)
            if not frames:
                if not self._answer(epoch):
                    return 1
            elif len(frames) > 1:
                if not self._start(epoch, runner, frames):
                    return 1
            else:
                message = decode_to_worker(frames[0])
                if isinstance(message, Shutdown):
                    return 0
                assert isinstance(message, PrepareGrammar)
                self._prepare_grammar(runner, message)

    def _receive(self, runner: Runner) -> list[bytes]:
        """The next message; none if the oldest step under way is done first, or went wrong.

        A worker that has nothing else to do does meanwhile what can be done ahead.
        """
        if self._under_way:
            while self._is_running(self._under_way[0]):
                if self._inbox.poll(0):
                    return self._inbox.recv_multipart()
                time.sleep(STEP_POLL_S)
            return []
        if not self._inbox.poll(IDLE_MS):
            while runner.work_ahead() and not self._inbox.poll(BETWEEN_MS):
                pass
        return self._inbox.recv_multipart()

    @staticmethod
    def _is_running(begun: BegunStep) -> bool:
        try:
            return not begun.step.is_done()
        except Exception:
            # It is told by whoever takes the step's tokens.
            return False

    def _load(self, setup: WorkerSetup) -> Runner | None:
        def tell(phase: str, done: int, total: int) -> None:
            self._send(StartProgress(epoch=setup.epoch, phase=phase, done=done, total=total))

        try:
            runner = make_runner(setup, StartReport(tell))
            samples = runner.warm_up() if setup.warm_up else []
            fingerprint, host = runner.describe()
        except EventLMError as error:
            self._send(WorkerFailed(epoch=setup.epoch, message=str(error), exit_code=error.exit_code))
            return None
        except Exception as error:
            # There is nothing of a client's yet that the error could quote.
            message = f"{type(error).__name__}: {error}"
            self._send(WorkerFailed(epoch=setup.epoch, message=message, traceback=traceback.format_exc()))
            return None
        ready = WorkerReady(
            epoch=setup.epoch,
            pid=os.getpid(),
            num_blocks=runner.num_blocks,
            notes=runner.notes,
            model_fingerprint=fingerprint,
            host=host,
            samples=samples,
        )
        # What is there stays; the collector need not look through it in the middle of a step.
        gc.collect()
        gc.freeze()
        self._send(ready)
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
                if self._grammar_outbox.closed:
                    return
                self._grammar_outbox.send(encode(GrammarBuilt(key=message.key, error=str(error) if error else "")))

        runner.prepare_grammar(message.grammar).add_done_callback(answer)

    def _start(self, epoch: int, runner: Runner, frames: list[bytes]) -> bool:
        """Begin one launch; False if this worker must not go on."""
        launch, payload = decode_body(frames[0]), decode_to_worker(frames[1])
        assert isinstance(launch, Launched)
        assert isinstance(payload, StepPayload)
        self._busy_since_ns = self._busy_since_ns or time.monotonic_ns()
        try:
            step = runner.start(launch, payload)
        except DesyncError as error:
            # What came before it stands.
            while self._under_way:
                if not self._answer(epoch):
                    return False
            self._send(WorkerDesync(epoch=epoch, step=launch.step, detail=error.detail))
            return False
        except Exception as error:
            return self._fail(epoch, error)
        self._under_way.append(BegunStep(launch.step, step))
        return True

    def _answer(self, epoch: int) -> bool:
        """Tell what the oldest step under way gave; False if this worker must not go on."""
        number, step = self._under_way.popleft()
        try:
            output = step.finish()
            start_ns, end_ns = step.times_ns
        except Exception as error:
            return self._fail(epoch, error)
        # The next one has waited for this one, which is no sign that it hangs.
        self._busy_since_ns = time.monotonic_ns() if self._under_way else 0
        self._send(StepResult(epoch=epoch, step=number, start_ns=start_ns, end_ns=end_ns, **output._asdict()))
        return True

    def _fail(self, epoch: int, error: Exception) -> bool:
        """Say what ended this worker."""
        # What others than the engine say may quote a client's request; where it happened belongs into the log.
        message = str(error) if isinstance(error, EventLMError) else type(error).__name__
        self._send(WorkerFailed(epoch=epoch, message=message, traceback=describe(error)))
        return False

    def _send(self, message: Any) -> None:
        self._outbox.send(encode(message))

    def _beat(self, setup: WorkerSetup) -> None:
        """Runs in a thread of its own, with a socket of its own."""
        socket = self._push()
        while os.getppid() == self._parent_pid:
            since = self._busy_since_ns
            socket.send(encode(Heartbeat(epoch=setup.epoch, busy_ns=time.monotonic_ns() - since if since else 0)))
            if self._is_over.wait(setup.heartbeat_ns / 1e9):
                socket.close()
                return
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
