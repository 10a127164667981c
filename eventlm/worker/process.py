"""A worker process: reads messages, runs the worker's loop and sends what that answers. Start it with

    python -m eventlm.worker.process INBOX OUTBOX PARENT_PID [LIBRARY ...]

INBOX and OUTBOX are the addresses of a pipe; if the engine is on another host, an environment variable has its keys.
The libraries are modules that are imported before the setup is awaited. The main thread computes. A second one ends the
process when its parent has died, so that no worker outlives its engine. With a keeper, which adopts it and whose id is
in an environment variable, it goes on for a while, and another engine may take it over with a setup for a new epoch. A
third thread sends heartbeats, and ends the
process when an engine on another host is silent.

What they wait for is of a `System`, so all of it but `main` also runs on a simulated host.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NoReturn

from eventlm.system.child_pipe import LINGER_MS
from eventlm.system.collector import lasting_objects
from eventlm.system.pipes import Sender
from eventlm.system.processes import KEEPER_VARIABLE, PARENT_POLL_S
from eventlm.system.remote_ends import RemoteEnds
from eventlm.system.system import System, real_system
from eventlm.system.threads import run_blocking
from eventlm.worker.loop import LoadedRunner, WorkerLoop, load
from eventlm.worker.protocol import (
    FromWorker,
    GrammarBuilt,
    Heartbeat,
    Pulse,
    StartProgress,
    WorkerFailed,
    WorkerSetup,
    decode_pulse,
    decode_to_worker,
    encode,
)
from eventlm.worker.runner import Runner
from eventlm.worker.start_report import OnPhase

#: A worker that has waited this long for a step does what can be done ahead.
IDLE_S = 0.02
#: How often it checks whether the device is done, while a step is under way.
STEP_POLL_S = 50e-6
#: The pause between two pieces of work done ahead: a thread may do them, and must not be asked all the time.
BETWEEN_S = 0.001
#: How long a worker waits for another engine when its own has died.
OUTLIVE_SECONDS = 30.0
#: How long a rank that has failed waits to be killed. Until then its end could be taken for the cause of others' ends.
STAY_SECONDS = 10.0

#: Makes the runner for a setup, as `load` does.
Loader = Callable[[WorkerSetup, System, OnPhase], Awaitable[LoadedRunner]]


async def load_for_good(setup: WorkerSetup, system: System, on_phase: OnPhase) -> LoadedRunner:
    """As `load`. What is loaded stays; the collector need not go through it in the middle of a step."""
    loaded = load(setup, system, on_phase)
    gc.collect()
    gc.freeze()
    return loaded


class Worker:
    """One worker process. ends: of a pipe to an engine on another host."""

    def __init__(
        self, system: System, inbox: str, outbox: str, ends: RemoteEnds | None = None, load: Loader = load_for_good
    ) -> None:
        self._system = system
        self._load = load
        self._pipe = system.pipes.open_child(inbox, outbox, ends)
        self._sender = self._pipe.sender()
        #: Of its own, because grammars are answered in several threads. None once it is closed.
        self._grammar_sender: Sender | None = self._pipe.sender()
        self._grammar_lock = threading.Lock()
        self._is_over = system.threads.latch()
        self._loop: WorkerLoop | None = None
        self._runner: Runner | None = None
        self._step_in_hand = -1
        #: With other ranks of this host. Empty: none.
        self._shared_folder = ""

    async def run(self, libraries: Sequence[str] = ()) -> int:
        """Import these, then serve until the engine ends it; the exit status."""
        for name in libraries:
            try:
                with lasting_objects():
                    importlib.import_module(name)
            except Exception as error:
                # It is met again where it is used, but a second import may fail with an error that tells less.
                print(f"cannot import {name}: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        setup = decode_to_worker((await self._pipe.receive())[0])
        assert isinstance(setup, WorkerSetup)
        self._shared_folder = setup.peers.shared_memory
        heart = self._system.threads.run("heart", partial(self._beat, setup))
        status = await self._serve(setup)
        if status and setup.layout.num_ranks > 1:
            await self._system.threads.sleep(STAY_SECONDS)
        self._is_over.set()
        if await heart.wait(LINGER_MS / 1000):
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

    async def _serve(self, setup: WorkerSetup) -> int:
        def send_progress(phase: str, done: int, total: int) -> None:
            self._send(StartProgress(epoch=setup.epoch, phase=phase, done=done, total=total))

        runner, message = await self._load(setup, self._system, send_progress)
        self._send(message)
        if runner is None or isinstance(message, WorkerFailed):
            return 1
        self._runner = runner
        loop = self._loop = WorkerLoop(
            message,
            runner,
            self._system.clock,
            self._send_grammar,
            answers=setup.rank == setup.layout.answering_rank,
            hold_step=self._holder(setup),
        )
        while loop.exit_status is None:
            frames = await self._receive(loop, runner)
            for answer in loop.take(frames) if frames else loop.answer():
                self._send(answer)
        return loop.exit_status

    def _holder(self, setup: WorkerSetup) -> Callable[[int], None]:
        """Notes which step is in hand, for heartbeats and, where ranks share a folder, for after its death."""
        shared = setup.peers.shared_memory
        board = self._system.shared_folders.board(shared) if shared else None

        def hold(step: int) -> None:
            self._step_in_hand = step
            if board is not None:
                board.write(setup.rank, step)

        return hold

    async def _receive(self, loop: WorkerLoop, runner: Runner) -> list[bytes]:
        """The next message; none if the oldest step under way ends first.

        A worker that has nothing else to do does meanwhile what can be done ahead.
        """
        if loop.has_steps:
            while loop.is_running():
                left_s = (loop.due_ns - self._system.clock.monotonic_ns()) / 1e9
                if await self._pipe.wait(max(left_s, STEP_POLL_S)):
                    return await self._pipe.receive()
            return []
        if not await self._pipe.wait(IDLE_S):
            while runner.work_ahead() and not await self._pipe.wait(BETWEEN_S):
                pass
        return await self._pipe.receive()

    def _send(self, message: FromWorker) -> None:
        self._sender.send(encode(message))

    def _send_grammar(self, message: GrammarBuilt) -> None:
        with self._grammar_lock:
            if self._grammar_sender is not None:
                self._grammar_sender.send(encode(message))

    async def watch_parent(self, parent_pid: int, keeper_pid: int) -> None:
        """End the process once its parent has died, and no other engine takes it over. Runs in a thread of its own, to
        the very end: what a library does then may wait for a peer.
        """
        processes = self._system.processes
        await processes.orphaned(parent_pid)
        is_ready = self._loop is not None and not self._shared_folder
        if keeper_pid and processes.parent_pid == keeper_pid and is_ready:
            processes.print_to(keeper_pid)
            await self._outlive(keeper_pid)
        # The engine has died and cannot tidy up.
        self._pipe.remove()
        if self._shared_folder:
            self._system.shared_folders.remove(self._shared_folder)
        self._system.processes.exit(1)

    async def _outlive(self, keeper_pid: int) -> None:
        """Return once the keeper has died, or there has been no engine for too long."""
        processes, clock = self._system.processes, self._system.clock
        seen_ns = clock.monotonic_ns()
        while processes.parent_pid == keeper_pid and clock.monotonic_ns() - seen_ns < OUTLIVE_SECONDS * 1e9:
            await self._system.threads.sleep(PARENT_POLL_S)
            if self._loop is not None and self._loop.engine_pid and processes.is_running(self._loop.engine_pid):
                seen_ns = clock.monotonic_ns()

    async def _beat(self, setup: WorkerSetup) -> None:
        """Runs in a thread of its own."""
        sender, pulses = self._pipe.sender(), self._pipe.pulses()
        clock, heartbeat_s = self._system.clock, setup.heartbeat_ns / 1e9
        is_over = False
        heard_ns = clock.monotonic_ns()
        pulse: Pulse | None = None
        while not is_over:
            epoch = setup.epoch if self._loop is None else self._loop.epoch
            sender.send(encode(self._heartbeat(epoch, pulse)))
            if pulses is None:
                is_over = await self._is_over.wait(heartbeat_s)
                continue
            message = await pulses.receive(heartbeat_s)
            pulse = decode_pulse(message) if message is not None else None
            now_ns = clock.monotonic_ns()
            heard_ns = now_ns if pulse is not None else heard_ns
            if now_ns - heard_ns > setup.silence_ns:
                self._system.processes.exit(1, "the engine is silent: this rank leaves")
            is_over = await self._is_over.wait(0)
        if pulses is not None:
            pulses.close()
        sender.close()

    def _heartbeat(self, epoch: int, pulse: Pulse | None) -> Heartbeat:
        now_ns = self._system.clock.monotonic_ns()
        since_ns = self._loop.busy_since_ns if self._loop is not None else 0
        return Heartbeat(
            epoch=epoch,
            busy_ns=now_ns - since_ns if since_ns else 0,
            step=self._step_in_hand,
            waits=self._runner is not None and self._runner.waits_for_peers,
            pulse_ns=pulse.sent_ns if pulse is not None else 0,
            clock_ns=now_ns if pulse is not None else 0,
        )


async def work(
    system: System,
    arguments: Sequence[str],
    ends: RemoteEnds | None = None,
    load: Loader = load_for_good,
    *,
    keeper_pid: int = 0,
) -> int:
    """Do what the process is there for; its exit status. arguments: of the command line. keeper_pid: the process that
    keeps its parent; 0: none does.
    """
    inbox, outbox, parent_pid, *libraries = arguments
    worker = Worker(system, inbox, outbox, ends, load)
    system.threads.run("parent", partial(worker.watch_parent, int(parent_pid), keeper_pid))
    return await worker.run(libraries)


def main() -> NoReturn:
    """Entry point of the process."""
    # Some of those who stop an engine send the signal to all of its processes; it decides when its workers leave.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    system, keeper_pid = real_system(), int(os.environ.pop(KEEPER_VARIABLE, "0"))
    try:
        status = run_blocking(work(system, sys.argv[1:], RemoteEnds.take(), keeper_pid=keeper_pid))
    except BaseException:
        traceback.print_exc()
        status = 1
    # The interpreter's own end would abort the process where a thread waits in Gloo for a peer.
    atexit._run_exitfuncs()
    sys.stderr.flush()
    system.processes.exit(status)


if __name__ == "__main__":
    main()
