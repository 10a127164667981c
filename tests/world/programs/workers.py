"""Worker processes: the real program, with a fake model that takes some time to load."""

from __future__ import annotations

from collections.abc import Sequence

from eventlm.system.system import System
from eventlm.worker.loop import LoadedRunner, load
from eventlm.worker.process import work
from eventlm.worker.protocol import WorkerFailed, WorkerSetup, encode
from eventlm.worker.start_report import READING_WEIGHTS, OnPhase
from tests.world.machine.blocking import run_program
from tests.world.machine.host import system_of
from tests.world.machine.process import Child, Process
from tests.world.machine.spawn_faults import Module

MODULE = "eventlm.worker.process"
_LOAD_NS = (50_000_000, 2_000_000_000)


def _run(process: Process, child: Child, arguments: Sequence[str]) -> None:
    async def load_slowly(setup: WorkerSetup, system: System, on_phase: OnPhase) -> LoadedRunner:
        on_phase(READING_WEIGHTS, 0, 1)
        load_ns = process.world.draws.between(*_LOAD_NS, "load", process.pid)
        await system.threads.sleep(load_ns / 1e9)
        return load(setup, system, on_phase)

    run_program(process, lambda: work(system_of(process, {}), arguments, load=load_slowly), process.end)


def _say_wrong(process: Process, child: Child, arguments: Sequence[str]) -> None:
    """Answer the setup with an unreadable message, or with one that says that the worker cannot start."""
    inbox, outbox, parent_pid, *_ = arguments
    is_unreadable = process.world.draws.draw("wrong hello", process.pid) % 2

    system = system_of(process, {})

    async def answer() -> None:
        pipe = system.pipes.open_child(inbox, outbox)
        await pipe.receive()
        pipe.sender().send(b"hello" if is_unreadable else encode(WorkerFailed(epoch=0, message="it has no memory")))

    run_program(process, answer, lambda _: None)
    # An engine that dies early never sends the setup.
    run_program(process, lambda: system.processes.orphaned(int(parent_pid)), lambda _: process.end(1))


#: The module that workers run.
PROGRAMS = Module(_run, _say_wrong)
