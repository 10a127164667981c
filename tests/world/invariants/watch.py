"""Invariants that are checked while a world runs: queues are bounded, times are the host's, and what must happen soon
does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from eventlm.bus.bus import Bus
from eventlm.bus.subscription import Lagged
from eventlm.config import Config
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.sequence import State
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.replicas.controller import MAX_DOUBLINGS, RESTART_SECONDS
from eventlm.engine.request_registry import RUN_ON_SECONDS
from eventlm.events import Event, Finished, StepCompleted, Streamed
from eventlm.types import SequenceId
from tests.world.invariants.checks import Checks
from tests.world.invariants.executions import Executions
from tests.world.invariants.recoveries import first_new_s
from tests.world.machine.network import Socket
from tests.world.machine.process import Process
from tests.world.machine.world import SECOND, World

if TYPE_CHECKING:
    from tests.world.plans.plan import Visit
    from tests.world.programs.client import Client
    from tests.world.programs.server import WorldServer

_LOOK_NS = SECOND // 4
#: What must happen soon happens within `_SOON_NS`, during which no process of the server was stalled for `_STALL_NS`.
_SOON_NS, _STALL_NS = 3 * SECOND, SECOND // 5
#: Timestamps of the same moment may differ by some nanoseconds.
_SAME_NS = 1000
#: The most bytes that a connection may buffer for a client that does not read.
_MOST_BUFFERED = 1024 * 1024


#: The longest time for which a fault may stop a worker or a backend from working, or from being started.
_MOST_FAULT_SECONDS = 90
#: The time between several restarts in a row. Failing starts make it reach its maximum.
_RESTARTS_SECONDS = round(2 * RESTART_SECONDS * 2**MAX_DOUBLINGS)


def _patience_seconds(config: Config) -> int:
    """After this many seconds without another fault, a failure has been noticed and something else tried."""
    if config.gateway.backend:
        gateway = config.gateway
        tried = gateway.first_token_timeout_seconds + gateway.silence_timeout_seconds + gateway.outage_seconds
        return tried + _MOST_FAULT_SECONDS
    noticed = config.worker.step_timeout_seconds + config.worker.heartbeat_timeout_seconds
    return noticed + _RESTARTS_SECONDS + _MOST_FAULT_SECONDS


class Watch:
    """Checks at intervals while there are clients. config: the server's. can_give_up: the engine may give up its
    replicas. visits: all of the plan. wrong: what was found while the server's code ran, as names of invariants and
    details.
    """

    def __init__(
        self,
        world: World,
        checks: Checks,
        server: Callable[[], WorldServer],
        *,
        config: Config,
        can_give_up: bool = False,
        visits: Sequence[Visit] = (),
    ) -> None:
        self.wrong: list[tuple[str, str]] = []
        self._world = world
        self._checks = checks
        self._can_give_up = can_give_up
        self._server = server
        self._write_timeout_ns = config.server.write_timeout_seconds * SECOND
        self._patience_seconds = _patience_seconds(config)
        #: When a request last made progress, or none was waiting.
        self._served_ns = 0
        self._clients: list[Client] = []
        #: When each client was first seen to be gone, by visit.
        self._gone_ns: dict[int, int] = {}
        #: Since when each sequence has been waiting for an edge of the current server to check its whole text.
        self._closing_ns: dict[SequenceId, int] = {}
        self._runs_since_ns = 0
        self._bus: Bus | None = None
        self._visits = visits
        self._keep_seconds = config.server.resume_seconds or RUN_ON_SECONDS
        self._executions = Executions((), 0)
        self._is_looking = False

    def come(self, client: Client) -> None:
        """A client has come."""
        self._clients.append(client)
        if not self._is_looking:
            self._is_looking = True
            self._look()

    def _look(self) -> None:
        world, server = self._world, self._server()
        for process in server.processes:
            if process.free_ns > world.now_ns + _STALL_NS:
                self._runs_since_ns = max(self._runs_since_ns, process.free_ns)
        engine = server.engine
        if not server.process.is_dead and engine is not None and engine._engine_core is not None:
            lives = engine.state != "dead"
            is_given_up = self._can_give_up and not any(engine._replicas.num_live)
            self._checks.check("the engine lives", lives or is_given_up, "it has died")
            if lives:
                self._look_at(server.process, engine, engine._engine_core.core.state)
        self._is_looking = bool(self._clients)
        if self._is_looking:
            world.after(_LOOK_NS, self._look)

    def _look_at(self, process: Process, engine: InferenceEngine, state: CoreState) -> None:
        bus = engine.bus
        if bus is not self._bus:
            self._bus = bus
            self._closing_ns.clear()
            self._gone_ns = dict.fromkeys(self._gone_ns, self._world.now_ns)
            self._served_ns = self._world.now_ns
            if (recovered := engine._recovered) is not None:
                self._executions.go_on(first_new_s(recovered))
            else:
                self._executions = Executions(self._visits, self._keep_seconds)
            origin_ns = engine.origin_ns
            bus.attach(lambda event: self._see(event, process.monotonic_ns - origin_ns))
        self._check_soon(process.world_ns(engine.origin_ns), state)
        self._check_closing(state)
        self._check_served(state)
        self._check_queues(bus)
        self.check_wrong()

    def check_wrong(self) -> None:
        """Fail if anything was found while the server's code ran."""
        for name, detail in self.wrong:
            self._checks.check(name, False, detail)

    def _is_soon_over(self, since_ns: int) -> bool:
        """Whether what had to happen soon after `since_ns` must have happened by now."""
        return self._world.now_ns > max(since_ns, self._runs_since_ns) + _SOON_NS

    def _see(self, event: Event, now_ns: int) -> None:
        """Check an event that the engine publishes. Runs in the engine's process. now_ns: on the run's clock."""
        checks = self._checks
        if isinstance(event, StepCompleted | Streamed | Finished):
            self._served_ns = self._world.now_ns
        checks.counts["one execution a key"] += 1
        if twice := self._executions.see(event):
            self.wrong.append(("one execution a key", twice))
        checks.counts["times of the log are the host's"] += 1
        if event.ts > now_ns + _SAME_NS or (isinstance(event, StepCompleted) and event.end_ns > event.ts):
            self.wrong.append(("times of the log are the host's", f"{event} at {now_ns}"))

    def _check_soon(self, origin_ns: int, state: CoreState) -> None:
        """Check that what must happen soon has happened. origin_ns: when the run's clock was 0."""
        checks, now_ns = self._checks, self._world.now_ns
        live = state.requests.values()
        came_ns = {each.arrival.seed: origin_ns + each.arrival.ts for each in live}
        for client in [*self._clients]:
            if not client.is_over:
                continue
            number = client.visit.number
            self._gone_ns.setdefault(number, now_ns)
            gone_ns = max(self._gone_ns.get(each.visit.number, now_ns) for each in client.same if each in self._clients)
            seed = str(client.visit.body["seed"])
            has_ended = seed not in came_ns
            # The request may have waited to be accepted.
            is_over = self._is_soon_over(max(gone_ns, came_ns.get(seed, 0)) + client.keep_ns)
            if is_over:
                checks.check("requests end with their clients", has_ended, f"visit {number} goes on")
            if is_over or (has_ended and client.reply.is_whole):
                self._clients.remove(client)
                del self._gone_ns[number]
        for request in live:
            scheduling = request.arrival.scheduling
            if scheduling.drop_if_late and scheduling.deadline_ns:
                due_ns = origin_ns + request.arrival.ts + scheduling.deadline_ns
                is_late = any(not each.ended and not each.num_output_tokens for each in request.sequences)
                is_dropped = not (is_late and self._is_soon_over(due_ns))
                checks.check("late requests are dropped", is_dropped, f"request {request.arrival.s}")

    def _check_closing(self, state: CoreState) -> None:
        """Check that edges report the end of each text, at the latest when a client that reads nothing is dropped."""
        now_ns, live = self._world.now_ns, state.requests.values()
        closing = [each.id for request in live for each in request.sequences if each.state is State.CLOSING]
        self._closing_ns = {identity: self._closing_ns.get(identity, now_ns) for identity in closing}
        for identity, since_ns in self._closing_ns.items():
            is_late = self._is_soon_over(since_ns + self._write_timeout_ns)
            self._checks.check("edges end texts", not is_late, f"{identity} waits for the end of its text")

    def _check_served(self, state: CoreState) -> None:
        """Check that some waiting request is served within the times that the configuration allows."""
        if not state.requests or state.paused:
            self._served_ns = self._world.now_ns
        since_ns = max(self._served_ns, self._runs_since_ns)
        is_served = self._world.now_ns <= since_ns + self._patience_seconds * SECOND
        self._checks.check("somebody is served", is_served, f"nobody for {self._patience_seconds} s")

    def _check_queues(self, bus: Bus) -> None:
        checks, own = self._checks, set(self._server().processes)
        for buffer in bus._buffers:
            fits = len(buffer._items) <= buffer._capacity
            checks.check("queues of subscribers are bounded", fits, f"{len(buffer._items)} events")
        for process in own:
            for handle in process.handles.values():
                if isinstance(handle, Socket) and handle.transport is not None and handle.peer is not None:
                    size = handle.transport.get_write_buffer_size()
                    is_own = bool(handle.peer.holders & own)
                    checks.check("buffers of connections are bounded", is_own or size <= _MOST_BUFFERED, f"{size}")

    def subscribe(self, detail: int) -> bool:
        """Subscribe slowly, and leave after a while. The subscriber must get each event, or be told which ones it
        missed.
        """
        server = self._server()
        engine = server.engine
        if server.process.is_dead or engine is None or not server.is_ready:
            return False

        async def read() -> None:
            expected, num_left = engine.bus.next_s, 1 + detail % 50
            async with engine.bus.subscribe(capacity=1 + detail % 64) as subscription:
                async for item in subscription:
                    first = item.from_seq if isinstance(item, Lagged) else item.s
                    self._world.faults["subscriber lagged"] += isinstance(item, Lagged)
                    self._checks.counts["subscribers miss nothing untold"] += 1
                    if first != expected:
                        self.wrong.append(("subscribers miss nothing untold", f"{item} after {expected - 1}"))
                    expected = item.to_seq + 1 if isinstance(item, Lagged) else item.s + 1
                    num_left -= 1
                    if not num_left:
                        return
                    await asyncio.sleep(detail % 7)

        loop = server.process.loop
        loop.call_soon(lambda: loop.create_task(read()))
        return True
