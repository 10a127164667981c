"""The lives of a world's server: it dies, alone or with its host, and another one starts on the same disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventlm.bus.log_writer import LogWriteError
from eventlm.errors import ExitCode, UsageError
from eventlm.system.processes import PARENT_POLL_S
from tests.world.invariants.recoveries import Recoveries
from tests.world.machine.process import SIGKILL, Process
from tests.world.machine.world import SECOND
from tests.world.programs.server import WorldServer

if TYPE_CHECKING:
    from tests.world.programs.client import Client
    from tests.world.programs.http_client import Reply
    from tests.world.run import Run

#: How long a service manager waits before it starts the next server.
_RESTART_NS = (SECOND // 2, 20 * SECOND)
#: The time between two health probes.
_PROBE_NS = 10 * SECOND
#: How long clients and children of a server take at most to notice its death.
_NOTICE_NS = round(PARENT_POLL_S * 1e9) + SECOND


class Lives:
    """Starts a server when one has ended. servers: the last one, and the one before it. is_ending: start no more."""

    def __init__(self, run: Run) -> None:
        self.servers: list[WorldServer] = []
        self._num_begun = 0
        self.is_ending = False
        self._run = run
        self._suspended_until_ns = 0
        self.recoveries = Recoveries(run)
        #: Clients whose replies the next server must go on with.
        self._waiting: list[Client] = []
        self._begin()

    def _begin(self) -> None:
        world = self._run.world
        if world.now_ns < self._suspended_until_ns:
            world.at(self._suspended_until_ns, self._begin)
            return
        self._num_begun += 1
        server = self._run.start_server("engine" if self._num_begun == 1 else f"engine {self._num_begun}")
        self.servers = [*self.servers[-1:], server]
        server.process.on_end(lambda _: self._ended(server))
        server.on_ready = lambda: self._is_ready(server)
        if self._run.can_give_up:
            self._probe(server)

    def _probe(self, server: WorldServer) -> None:
        """End a server that reports that it is not healthy, as an orchestrator does."""
        if server.process.is_dead or server.stop.is_set():
            return
        if server.engine is not None and server.engine.state == "dead":
            self._run.world.faults["engine given up"] += 1
            server.terminate()
        self._run.world.after(_PROBE_NS, lambda: self._probe(server))

    def children(self) -> list[Process]:
        """The children of the last server."""
        return [each for each in self._run.world.processes if each.parent is self.servers[-1].process]

    @property
    def is_well(self) -> bool:
        """Whether the last server and all of its workers are ready, and no process is frozen or late to start."""
        server, now_ns = self.servers[-1], self._run.world.now_ns
        engine = server.engine
        if not server.is_ready or engine is None or engine.state != "ready":
            return False
        replicas = engine._replicas._all.values()
        are_started = all(each.is_up or (each._task is not None and each._task.done()) for each in replicas)
        return are_started and not any(each.free_ns > now_ns + SECOND for each in self._on_host())

    @property
    def keeps_nothing(self) -> bool:
        """Whether the last server is well and keeps no reply."""
        engine = self.servers[-1].engine
        return self.is_well and engine is not None and not engine.registry.num_bytes

    @property
    def is_there(self) -> bool:
        """Whether connections reach the last server, and not the remains of another."""
        parents = [each.parent for each in self._run.world.processes if each.parent is not None]
        last = self.servers[-1]
        return last.is_listening and not any(each.is_dead for each in (last.process, *parents))

    def _ended(self, server: WorldServer) -> None:
        run, world = self._run, self._run.world
        if self.is_ending:
            server.drop_engine()
            return
        clients = [client for client in run.clients if not client.is_over]
        goes_on = self.recoveries.died(server)
        server.drop_engine()
        for client in clients:
            if client not in self._waiting and client.lose_server(goes_on=goes_on):
                self._waiting.append(client)
        asked = [(client, client.reply) for client in clients]
        # Some may be frozen children of the server before.
        children = [each for each in self._on_host() if each is not server.process]
        world.after(0, lambda: self._check_dead(server))
        world.after(_NOTICE_NS, lambda: self._check_noticed(asked, children))
        world.after(world.draws.between(*_RESTART_NS, "restart", self._num_begun), self._begin)

    def _is_ready(self, server: WorldServer) -> None:
        has_gone_on = self.recoveries.is_ready(server)
        waiting, self._waiting = self._waiting, []
        for client in waiting:
            client.find_server(has_gone_on=has_gone_on)

    def _check_dead(self, server: WorldServer) -> None:
        self._run.logs.check_dead(server)
        error, status = server.error, server.process.returncode
        if status == -SIGKILL:
            return
        checks, told = self._run.checks, f"{status}: {error!r}"
        checks.check("no server ends without a reason", error is not None or server.stop.is_set(), told)
        checks.check("exit statuses say why", status == (ExitCode.OK if error is None else error.exit_code), told)
        # After this status, a service manager does not restart the server.
        is_usage = isinstance(error, UsageError | LogWriteError)
        checks.check("others may do better", status != ExitCode.USAGE or is_usage, told)

    def _check_noticed(self, asked: list[tuple[Client, Reply]], children: list[Process]) -> None:
        checks, now_ns = self._run.checks, self._run.world.now_ns
        left = [each for each in children if not each.is_dead]
        if any(each.free_ns > now_ns - _NOTICE_NS for each in left):
            # A frozen child notices it later.
            return
        checks.check("children leave with the server", not left, f"{[each.name for each in left]} go on")
        # What had been sent before may have made a client leave.
        late = [reply for client, reply in asked if reply.is_under_way and not (reply.has_paused or client.has_left)]
        checks.check("connections end with the server", not late, f"{len(late)} go on")

    def reboot(self) -> None:
        """Crash and restart the server's host: its processes end, what is not on the disk's medium is gone, and its
        monotonic clock restarts at 0.
        """
        world = self._run.world
        for process in self._on_host():
            process.end(-SIGKILL)
        world.boot_ns = world.now_ns
        world.num_boots += 1
        world.pipes.clear()
        world.folders.clear()
        if self.recoveries.rebooted():
            for client in self._run.clients:
                client.was_rewound = client.was_rewound or not client.is_over
        self._run.logs.reboot()

    def suspend(self, duration_ns: int, *, stops_clock: bool) -> bool:
        """Stop all processes of the server's host for a while. False if they are stopped already. stops_clock: the
        monotonic clock stops too, as when Linux suspends; if the host is a virtual machine that is paused, all clocks
        go on.
        """
        world = self._run.world
        if world.now_ns < self._suspended_until_ns:
            return False
        self._suspended_until_ns = world.now_ns + duration_ns
        for process in self._on_host():
            process.suspend(duration_ns, stops_clock=stops_clock)
        if stops_clock:
            world.boot_ns += duration_ns
        return True

    def _on_host(self) -> list[Process]:
        """The last server's process, and the children of all servers."""
        server = self.servers[-1].process
        return [each for each in self._run.world.processes if each is server or each.parent is not None]
