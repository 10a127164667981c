"""The clocks of a world's host: a reboot sets them to 0; a suspend stops all processes, and may stop the clock."""

from __future__ import annotations

import subprocess
from typing import ClassVar

import pytest
from msgspec import structs

from eventlm.errors import ExitCode
from tests.world.machine.host import WorldPipes
from tests.world.machine.process import SIGKILL, Child, Process
from tests.world.machine.spawn_faults import SpawnFaults
from tests.world.machine.world import SECOND, World
from tests.world.plans.plan import Fault, Plan
from tests.world.programs import front_ends, workers
from tests.world.programs.server import WorldServer
from tests.world.run import Run, quiet
from tests.world.test_front_ends import plan


def _ran(what: Plan, *faults: Fault) -> Run:
    with quiet() as lines:
        run = Run(what._replace(faults=[*faults]), lines)
        run.run()
    return run


def test_after_a_reboot_the_clock_of_the_host_begins_at_0() -> None:
    run = _ran(plan(), Fault(0, SECOND, "reboot", 0))
    first, second = (server.process for server in run.servers)
    began_ns = run.world.now_ns - second.monotonic_ns
    assert first.monotonic_ns > second.monotonic_ns
    assert began_ns == first.ended_ns
    assert second.returncode == 0


@pytest.mark.parametrize("stops_clock", [True, False])
def test_a_suspend_of_the_host_costs_time_and_nothing_else(stops_clock: bool) -> None:
    detail = 15 if stops_clock else 90 + 15
    run = _ran(plan(num_tries=0), Fault(0, SECOND, "suspend", detail))
    process = run.server.process
    assert len(run.servers) == 1
    assert run.world.now_ns - process.monotonic_ns == 15 * SECOND * stops_clock
    for client in run.clients:
        assert client.reply.is_done
        assert b'"error"' not in client.reply.body


class _FailingStarts(Run):
    """Kills all children that run the module, none of which then starts properly for a minute."""

    module: ClassVar[str]

    def start_server(self, name: str) -> WorldServer:
        """As Run.start_server, but keeps all servers."""
        server = super().start_server(name)
        self.all_servers = [*getattr(self, "all_servers", ()), server]
        return server

    def _happen(self, fault: Fault) -> None:
        self.world.spawn_faults = SpawnFaults(1, self.module)
        self.world.after(60 * SECOND, lambda: setattr(self.world, "spawn_faults", SpawnFaults()))
        for child in self.lives.children():
            if child.name.startswith(self.module):
                child.end(-SIGKILL)


def _with_failing_starts(module: str, what: Plan) -> _FailingStarts:
    with quiet() as lines:
        run = type("", (_FailingStarts,), {"module": module})(what._replace(seconds=70), lines)
        run.run()
    return run


def _events(run: Run) -> list[str]:
    return [str(line["event"]) for line in run.lines]


def test_a_server_without_front_ends_ends_and_says_so_until_they_start() -> None:
    run = _with_failing_starts(front_ends.MODULE, plan())
    first, *between, last = run.all_servers
    assert (first.process.returncode, str(first.error)) == (
        ExitCode.FAILED,
        "no front end is left; see the log above for why they ended",
    )
    assert _events(run).count("front end given up") == 2
    assert between
    assert {each.process.returncode for each in between} == {ExitCode.FAILED}
    assert last.process.returncode == ExitCode.OK


def test_an_engine_whose_workers_never_start_is_given_up_and_its_clients_are_told() -> None:
    what = plan(num_tries=0)
    config = what.config
    worker = structs.replace(config.worker, max_restarts=3, start_timeout_seconds=5)
    run = _with_failing_starts(workers.MODULE, what._replace(config=structs.replace(config, worker=worker)))
    assert _events(run).count("worker did not start") >= 3
    assert _events(run)[:-1].count("replica given up") == 1
    assert run.world.faults["engine given up"] == 1
    assert run.all_servers[0].process.returncode == ExitCode.OK
    told = [bytes(client.reply.body) for client in run.clients[:-1]]
    assert all(b"no worker is left" in each for each in told)


def test_what_a_worker_says_in_place_of_a_hello_is_in_the_log() -> None:
    run = _with_failing_starts(workers.MODULE, plan(num_tries=0))
    errors = [str(line["error"]) for line in run.lines if line["event"] == "worker did not start"]
    words = (
        "sent a message that cannot be read",
        "it has no memory",
        "temporarily unavailable",
        "exit code 0",
        "SIGKILL",
    )
    assert [each for each in words if not any(each in error for error in errors)] == []


class _LeaveAtItsEnd(Run):
    """Kills the server; then something that it had sent arrives, and makes a client leave."""

    def _happen(self, fault: Fault) -> None:
        self.server.process.end(-SIGKILL)
        client = self.clients[0]
        client.visit = client.visit._replace(leaves_after=0)
        client._see()


def test_clients_that_leave_when_their_server_dies_need_not_notice_its_death() -> None:
    with quiet() as lines:
        run = _LeaveAtItsEnd(plan(num_tries=0), lines)
        run.run()
    assert run.clients[0].has_left
    assert run.clients[0].reply.is_under_way


def test_a_worker_that_would_say_something_wrong_does_not_outlive_an_engine_that_sends_no_setup() -> None:
    with quiet():
        world = World(0)
        engine = Process(world, "engine")
        worker = Process(world, "worker", engine)
        inbox, outbox = WorldPipes(engine).open().addresses
        workers.PROGRAMS.say_wrong(worker, Child(worker, stdout=subprocess.DEVNULL), (inbox, outbox, str(engine.pid)))
        world.run_for(1)
        assert not worker.is_dead
        engine.end(-SIGKILL)
        world.run_for(1)
        assert worker.is_dead


class _HalfOfAllFail(_FailingStarts):
    """Kills the server; for a minute after that, one of two front ends does not start properly."""

    module = front_ends.MODULE

    def _happen(self, fault: Fault) -> None:
        super()._happen(fault)
        self.world.spawn_faults = SpawnFaults(2, self.module)
        self.server.process.end(-SIGKILL)


def test_when_one_front_end_does_not_start_the_start_of_the_other_ends_too() -> None:
    with quiet() as lines:
        run = _HalfOfAllFail(plan(num_tries=0)._replace(seconds=70), lines)
        ran = run.run()
    assert str(run.all_servers[1].error).startswith("front end ")
    assert ran.checks["an orderly end leaves nothing"] == 1
