"""Runs cases on all cores, each in its own process with a time limit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import msgspec

from tests.world.swarm.cases import Case, Failure, Outcome, run_case

#: Forks inherit all loaded modules, and no seed sees what another one has left in their caches.
_FORK = multiprocessing.get_context("fork")


class _Started(NamedTuple):
    case: Case
    process: BaseProcess
    deadline: float


class Swarm:
    """Runs cases. num_jobs: processes at once. limit_seconds: real time that a case may take. run: runs one case."""

    def __init__(self, *, num_jobs: int, limit_seconds: float, run: Callable[[Case], Outcome] = run_case) -> None:
        self._run_one = run
        self._num_jobs = num_jobs
        self._limit_seconds = limit_seconds

    def run(self, cases: Iterable[Case]) -> Generator[tuple[Case, Outcome], None, None]:
        """Yield each case as it ends. Cases that are still running when the generator is closed are killed."""
        todo, started = iter(cases), dict[Connection, _Started]()
        try:
            while True:
                while len(started) < self._num_jobs and (case := next(todo, None)) is not None:
                    receiver, process = _start(case, self._run_one)
                    started[receiver] = _Started(case, process, time.monotonic() + self._limit_seconds)
                if not started:
                    return
                first = min(each.deadline for each in started.values())
                wait([*started], max(0.0, first - time.monotonic()))
                for receiver, each in [*started.items()]:
                    outcome = self._outcome(receiver, each)
                    if outcome is not None:
                        del started[receiver]
                        yield each.case, outcome
        finally:
            for receiver, each in started.items():
                _kill(each.process, receiver)

    def outcome(self, case: Case) -> Outcome:
        """Run one case."""
        return next(self.run([case]))[1]

    def _outcome(self, receiver: Connection, started: _Started) -> Outcome | None:
        """The outcome of a case; None: it is still running."""
        process = started.process
        if receiver.poll():
            try:
                outcome = msgspec.json.decode(receiver.recv_bytes(), type=Outcome)
            except EOFError:
                process.join()
                outcome = Outcome(failure=Failure("died", f"its process ended with status {process.exitcode}"))
        elif time.monotonic() >= started.deadline:
            outcome = Outcome(failure=Failure("hung", f"it took more than {self._limit_seconds:g} s"))
        else:
            return None
        _kill(process, receiver)
        return outcome


def _start(case: Case, run: Callable[[Case], Outcome]) -> tuple[Connection, BaseProcess]:
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_run, args=(case, run, sender))
    process.start()
    sender.close()
    return receiver, process


def _kill(process: BaseProcess, receiver: Connection) -> None:
    """End a process, and any process that it has started."""
    if process.exitcode is None and process.pid is not None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            # It has not yet become the leader of a process group.
            process.kill()
    process.join()
    receiver.close()


def _run(case: Case, run: Callable[[Case], Outcome], sender: Connection) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    outcome = run(case)
    if case.is_twice and outcome.failure is None:
        outcome = _compare(outcome, _run_fresh(case))
    sender.send_bytes(msgspec.json.encode(outcome))


def _run_fresh(case: Case) -> Outcome:
    """Run a case in a new process, in which strings have other hashes."""
    command = [
        sys.executable,
        "-m",
        "tests.world.simulate",
        *case._replace(is_twice=False).arguments,
        "--print-outcome",
    ]
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": hash_seed}, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=Outcome)


def _compare(first: Outcome, second: Outcome) -> Outcome:
    ran, again = first.ran, second.ran
    if ran is None or again is None:
        return Outcome(failure=Failure("not deterministic", f"it passed here, and then: {second.failure}"))
    fields = [name for name in ran.__struct_fields__ if name != "cpu_seconds"]
    differ = {name: (getattr(ran, name), getattr(again, name)) for name in fields}
    differ = {name: both for name, both in differ.items() if both[0] != both[1]}
    return first if not differ else Outcome(failure=Failure("not deterministic", f"they differ in {differ}"))
