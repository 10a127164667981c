"""A worker process: reads messages, runs the worker's loop and sends what that answers. Start it with

    python -m eventlm.worker.process INBOX OUTBOX PARENT_PID [LIBRARY ...]

INBOX and OUTBOX are the addresses of a pipe; if the engine is on another host, an environment variable has its keys.
The libraries are modules that are imported before the setup is awaited. The main thread computes. A second one ends the
process when its parent has died, so that no worker outlives its engine. A third one sends heartbeats, and ends the
process when an engine on another host is silent.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from eventlm.system.child_pipe import LINGER_MS, ChildPipe, Sender
from eventlm.system.clock import SystemClock
from eventlm.system.collector import lasting_objects
from eventlm.system.remote_ends import RemoteEnds
from eventlm.system.shared_folder import StepBoard, remove_folder
from eventlm.worker.loop import WorkerLoop, load
from eventlm.worker.protocol import (
    FromWorker,
    GrammarBuilt,
    Heartbeat,
    Pulse,
    StartProgress,
    WorkerSetup,
    decode_pulse,
    decode_to_worker,
    encode,
)
from eventlm.worker.runner import Runner

#: How often a worker checks that the engine is alive.
PARENT_POLL_S = 0.5
#: A worker that has waited this long for a step does what can be done ahead.
IDLE_MS = 20
#: How often it checks whether the device is done, while a step is under way.
STEP_POLL_S = 50e-6
#: The pause between two pieces of work done ahead: a thread may do them, and must not be asked all the time.
BETWEEN_MS = 1
#: How long a rank that has failed waits to be killed. Until then its end could be taken for the cause of others' ends.
STAY_SECONDS = 10.0


class Worker:
    """One worker process. ends: of a pipe to an engine on another host."""

    def __init__(self, inbox: str, outbox: str, parent_pid: int, ends: RemoteEnds | None = None) -> None:
        self._clock = SystemClock()
        self._parent_pid = parent_pid
        self._pipe = ChildPipe(inbox, outbox, ends)
        self._sender = self._pipe.sender()
        #: Of its own, because grammars are answered in several threads. None once it is closed.
        self._grammar_sender: Sender | None = self._pipe.sender()
        self._grammar_lock = threading.Lock()
        self._is_over = threading.Event()
        self._loop: WorkerLoop | None = None
        self._runner: Runner | None = None
        self._step_in_hand = -1
        #: With other ranks of this host. Empty: none.
        self._shared_folder = ""

    def run(self, libraries: Sequence[str] = ()) -> int:
        """Import these, then serve until the engine ends it; the exit status."""
        for name in libraries:
            try:
                with lasting_objects():
                    importlib.import_module(name)
            except Exception as error:
                # It is met again where it is used, but a second import may fail with an error that tells less.
                print(f"cannot import {name}: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        setup = decode_to_worker(self._pipe.receive()[0])
        assert isinstance(setup, WorkerSetup)
        self._shared_folder = setup.peers.shared_memory
        heart = threading.Thread(target=self._beat, args=(setup,), daemon=True)
        heart.start()
        status = self._serve(setup)
        if status and setup.layout.num_ranks > 1:
            time.sleep(STAY_SECONDS)
        self._is_over.set()
        heart.join(LINGER_MS / 1000)
        if not heart.is_alive():
            self._close()
        return status

    def _close(self) -> None:
        """Wait until the last messages are sent."""
        with self._grammar_lock:
            assert self._grammar_sender is not None
            self._grammar_sender.close()
            self._grammar_sender = None
        self._sender.close()
        self._pipe.close()

    def _serve(self, setup: WorkerSetup) -> int:
        def send_progress(phase: str, done: int, total: int) -> None:
            self._send(StartProgress(epoch=setup.epoch, phase=phase, done=done, total=total))

        runner, message = load(setup, os.getpid(), send_progress)
        if runner is not None:
            # What is loaded stays; the collector need not go through it in the middle of a step.
            gc.collect()
            gc.freeze()
        self._send(message)
        if runner is None:
            return 1
        self._runner = runner
        loop = self._loop = WorkerLoop(
            setup.epoch,
            runner,
            self._clock,
            self._send_grammar,
            answers=setup.rank == setup.layout.answering_rank,
            hold_step=self._holder(setup),
        )
        while loop.exit_status is None:
            frames = self._receive(loop, runner)
            for answer in loop.take(frames) if frames else loop.answer():
                self._send(answer)
        return loop.exit_status

    def _holder(self, setup: WorkerSetup) -> Callable[[int], None]:
        """Notes which step is in hand, for heartbeats and, where ranks share a folder, for after its death."""
        board = StepBoard(setup.peers.shared_memory) if setup.peers.shared_memory else None

        def hold(step: int) -> None:
            self._step_in_hand = step
            if board is not None:
                board.write(setup.rank, step)

        return hold

    def _receive(self, loop: WorkerLoop, runner: Runner) -> list[bytes]:
        """The next message; none if the oldest step under way ends first.

        A worker that has nothing else to do does meanwhile what can be done ahead.
        """
        if loop.has_steps:
            while loop.is_running():
                if self._pipe.poll(0):
                    return self._pipe.receive()
                time.sleep(STEP_POLL_S)
            return []
        if not self._pipe.poll(IDLE_MS):
            while runner.work_ahead() and not self._pipe.poll(BETWEEN_MS):
                pass
        return self._pipe.receive()

    def _send(self, message: FromWorker) -> None:
        self._sender.send(encode(message))

    def _send_grammar(self, message: GrammarBuilt) -> None:
        with self._grammar_lock:
            if self._grammar_sender is not None:
                self._grammar_sender.send(encode(message))

    def watch_parent(self) -> NoReturn:
        """End the process once its parent has died. Runs in a thread of its own, to the very end: what a library does
        then may wait for a peer.
        """
        while os.getppid() == self._parent_pid:
            time.sleep(PARENT_POLL_S)
        # The engine has died and cannot tidy up.
        self._pipe.remove()
        if self._shared_folder:
            remove_folder(self._shared_folder)
        os._exit(1)

    def _beat(self, setup: WorkerSetup) -> None:
        """Runs in a thread of its own."""
        sender, pulses = self._pipe.sender(), self._pipe.pulses()
        is_over = False
        heard_ns = self._clock.monotonic_ns()
        pulse: Pulse | None = None
        while not is_over:
            sender.send(encode(self._heartbeat(setup.epoch, pulse)))
            if pulses is None:
                is_over = self._is_over.wait(setup.heartbeat_ns / 1e9)
                continue
            message = pulses.receive(setup.heartbeat_ns // 1_000_000)
            pulse = decode_pulse(message) if message is not None else None
            now_ns = self._clock.monotonic_ns()
            heard_ns = now_ns if pulse is not None else heard_ns
            if now_ns - heard_ns > setup.silence_ns:
                print("the engine is silent: this rank leaves", file=sys.stderr)
                os._exit(1)
            is_over = self._is_over.is_set()
        if pulses is not None:
            pulses.close()
        sender.close()

    def _heartbeat(self, epoch: int, pulse: Pulse | None) -> Heartbeat:
        now_ns = self._clock.monotonic_ns()
        since_ns = self._loop.busy_since_ns if self._loop is not None else 0
        return Heartbeat(
            epoch=epoch,
            busy_ns=now_ns - since_ns if since_ns else 0,
            step=self._step_in_hand,
            waits=self._runner is not None and self._runner.waits_for_peers,
            pulse_ns=pulse.sent_ns if pulse is not None else 0,
            clock_ns=now_ns if pulse is not None else 0,
        )


def main() -> NoReturn:
    """Entry point of the process."""
    # Some of those who stop an engine send the signal to all of its processes; it decides when its workers leave.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    inbox, outbox, parent_pid, *libraries = sys.argv[1:]
    worker = Worker(inbox, outbox, int(parent_pid), RemoteEnds.take())
    threading.Thread(target=worker.watch_parent, daemon=True).start()
    try:
        status = worker.run(libraries)
    except BaseException:
        traceback.print_exc()
        status = 1
    # The interpreter's own end would abort the process where a thread waits in Gloo for a peer.
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
