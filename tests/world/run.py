"""One seed from start to rest: the server starts, clients come, faults happen, everything ends, and all is checked."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import structlog
import xxhash
from msgspec import Struct

from eventlm.cli.serve.server import with_resumable_streams
from eventlm.engine.admin import AdminAction
from eventlm.engine.backends.actions import AddBackend
from eventlm.engine.engine_core import FORGET_NS
from eventlm.engine.request_registry import RUN_ON_SECONDS
from eventlm.errors import EventLMError
from tests.cached_loggers import forget_cached_loggers
from tests.world.gateway import Gateway
from tests.world.invariants.attempts import check_attempts
from tests.world.invariants.checks import Checks
from tests.world.invariants.executions import Joins
from tests.world.invariants.keys import Secrets, check_let_in
from tests.world.invariants.leaks import Leaks
from tests.world.invariants.logs import Logs
from tests.world.invariants.metrics import check_gauges, read_page
from tests.world.invariants.privacy import Privacy
from tests.world.invariants.told import check_client
from tests.world.invariants.watch import Watch
from tests.world.lives import Lives
from tests.world.machine.disk_faults import DiskFaults
from tests.world.machine.loop import Killed
from tests.world.machine.network import Socket
from tests.world.machine.process import SIGKILL
from tests.world.machine.spawn_faults import SpawnFaults
from tests.world.machine.world import SECOND, World, collect
from tests.world.plans.fault_count import FaultCount
from tests.world.plans.faults import FAULTS
from tests.world.plans.gateway_faults import GATEWAY_FAULTS
from tests.world.plans.keys_plan import KEYS, KeysPlan
from tests.world.plans.plan import MANY_RESTARTS, Fault, Plan
from tests.world.programs.backends import in_time_of
from tests.world.programs.client import Client, fake_answer
from tests.world.programs.operator import Operator
from tests.world.programs.server import ADDRESS, WorldServer

MAX_MODEL_LEN = 512
#: How often a kernel brings everything pending to the medium.
_WRITE_BACK_NS = 30 * SECOND
#: Clients that ended this long ago are checked and forgotten.
_FORGET_NS = 3600 * SECOND
#: For how long spools may keep what is over.
_FORGET_SECONDS = FORGET_NS // SECOND + 5
#: Once faults have stopped, everything that can be served is served within this time.
REST_SECONDS = 900


class Ran(Struct, frozen=True):
    """The result of a seed. num_calls: calls into the system, by process. digest: of all bytes that clients received,
    of the log, of the number of draws and the final time. faults_set, faults: the faults that were set, and those that
    struck, by kind; hits: how often they had each effect. checks: the checked invariants, by name.
    """

    seed: int
    simulated_seconds: float
    cpu_seconds: float
    num_requests: int
    num_events: int
    num_calls: dict[str, int]
    digest: str
    faults_set: dict[str, int]
    faults: dict[str, int]
    hits: dict[str, int]
    checks: dict[str, int]
    statuses: dict[str, int]


def run_plan(plan: Plan) -> Ran:
    """Run a plan. Raises AssertionError if an invariant does not hold."""
    with quiet() as lines:
        return Run(plan, lines).run()


class Lines(list[dict[str, Any]]):
    """The lines that processes have logged. is_heard: whether a line logged now comes from a running process."""

    is_heard: Callable[[], bool] = staticmethod(lambda: True)


@contextlib.contextmanager
def quiet() -> Iterator[Lines]:
    """Collect the log of all processes. Garbage is collected only at fixed points: finalizers may act, and what is left
    of a dead process would try in vain to shut down cleanly, and log that.
    """
    lines = Lines()
    before, hear_before = structlog.get_config(), sys.unraisablehook

    def hear(error: Any) -> None:
        # Leftovers of dead processes cannot await, their loop may be closed, and no process may be running.
        is_left = inspect.iscoroutine(error.object) or getattr(error.object, "__name__", "") == "__del__"
        is_vain = isinstance(error.exc_value, (Killed, RuntimeError)) or not lines.is_heard()
        if not (is_left and is_vain):
            hear_before(error)

    def keep(_: Any, level: str, line: Any) -> str:
        if lines.is_heard():
            lines.append({**line, "level": level})
        raise structlog.DropEvent

    forget_cached_loggers()
    structlog.configure(processors=[keep], cache_logger_on_first_use=False)
    sys.unraisablehook = hear
    # Otherwise new objects would get a real loop, and keep it.
    asyncio.set_event_loop(None)
    # What other seeds have left may act too; one pass of the collector may not find all of it.
    lines.is_heard = lambda: False
    collect()
    # Leftovers of an earlier world may have logged something.
    lines.clear()
    gc.disable()
    del lines.is_heard
    # A dead process awaits nothing.
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
    try:
        yield lines
    finally:
        lines.is_heard = lambda: False
        collect()
        gc.enable()
        sys.unraisablehook = hear_before
        structlog.configure(**before)


class Run:
    """Runs a plan."""

    def __init__(self, plan: Plan, lines: Lines) -> None:
        self._plan = plan
        #: The servers' flags, as each of them completes them.
        self.config = with_resumable_streams(plan.config)
        self.lines = lines
        self.checks = Checks()
        self._secrets = Secrets(plan, self.checks)
        self._joins = Joins(self.checks)
        self.world = World(plan.seed, plan.deaths)
        self._faults = FaultCount(self.world.faults)
        lines.is_heard = lambda: self.world.running is not None
        #: All clients, without those that were forgotten.
        self.clients: list[Client] = []
        self._statuses: Counter[str] = Counter()
        self._digest = xxhash.xxh3_128()
        #: The gateway's backends, if other servers run the model.
        self.gateway: Gateway | None = None
        self.operator = Operator(self.world)
        if plan.keys is not None:
            self.operator.write(KEYS, plan.keys.content)
        if plan.gateway is not None:
            self.gateway = Gateway(self.world, plan.gateway, self.operator)
            # The backends are up before the gateway starts.
            self.world.run_for(1)
        self.world.disk.write_back()
        self.logs = Logs(self)
        self.lives = Lives(self)
        self.leaks = Leaks(self)
        self.watch = Watch(
            self.world,
            self.checks,
            lambda: self.server,
            config=self.config,
            can_give_up=self.can_give_up,
            visits=plan.visits,
        )

    @property
    def keys(self) -> KeysPlan | None:
        """The keys of the servers' clients, if they need any."""
        return self._plan.keys

    @property
    def servers(self) -> list[WorldServer]:
        """The last server, and the one before it."""
        return self.lives.servers

    @property
    def server(self) -> WorldServer:
        """The last server, which may be dead."""
        return self.servers[-1]

    @property
    def can_give_up(self) -> bool:
        """Whether the engine may give up its replicas."""
        return self.config.worker.max_restarts < MANY_RESTARTS

    def start_server(self, name: str) -> WorldServer:
        """Start another server, in a process with this name."""
        plan = self._plan
        return WorldServer(self.world, self.config, name=name, num_blocks=plan.num_blocks, max_model_len=MAX_MODEL_LEN)

    def run(self) -> Ran:
        """Run from start to rest."""
        with in_time_of(self.world):
            return self._run()

    def _run(self) -> Ran:
        began = time.process_time()
        plan, world = self._plan, self.world
        begin_ns = world.now_ns
        world.run(lambda: self.server.is_ready, most_seconds=REST_SECONDS)
        origin_ns = world.now_ns
        for visit in plan.visits:
            world.at(origin_ns + visit.at_ns, lambda visit=visit: self._come(visit))
        for fault in plan.faults:
            world.at(origin_ns + fault.at_ns, lambda fault=fault: self._happen(fault))
        world.after(_WRITE_BACK_NS, self._write_back)
        world.run_for(plan.seconds)
        self._stop_faults()
        world.run(lambda: self.lives.is_well, most_seconds=REST_SECONDS)
        world.run(lambda: all(each.is_over for each in self.clients) and self.lives.is_well, most_seconds=REST_SECONDS)
        self._check_rest()
        self.lives.is_ending = True
        self.server.terminate()
        world.run(lambda: self.server.process.is_dead, most_seconds=REST_SECONDS)
        if self.gateway is not None:
            self.gateway.stop(self.checks)
            check_attempts(self.checks, self.server.run_folder, self.world.disk.of("reader"), plan.config.gateway)
        world.run_for(5)
        self._check_end()
        self.lives.recoveries.check_end()
        self._add_up()
        return Ran(
            seed=plan.seed,
            simulated_seconds=(world.now_ns - begin_ns) / SECOND,
            num_requests=len(plan.visits),
            num_events=self.logs.check_end(),
            num_calls=world.num_calls,
            digest=self._digest.hexdigest(),
            **self._faults.counts(),
            checks=dict(self.checks.counts),
            statuses=dict(self._statuses),
            cpu_seconds=time.process_time() - began,
        )

    def _come(self, visit: Any) -> None:
        answer = fake_answer if self._plan.gateway is None else self._plan.gateway.answer
        client = Client(self.world, visit, ADDRESS, self.config.server, answer)
        self.logs.listen()
        client.num_told_before, client.came_in_outage = self.logs.num_told, self.logs.is_lossy
        client.has_lost_server = not self.lives.is_there
        client.edge_lost_ns = lambda: max(each.edge_lost_ns for each in self.servers)
        self._join(client)
        client.on_shown = lambda client: self.world.after(0, lambda: self.logs.check_shown(client))
        self.clients.append(client)
        self.watch.come(client)

    def _join(self, client: Client) -> None:
        """Relate a client to those with the same idempotency key, whose replies it may get."""
        key = client.visit.idempotency_key
        first = next((each for each in self.clients if key and each.visit.idempotency_key == key), None)
        if first is not None:
            client.same = first.same
            client.same.append(client)
            client.num_told_before = min(each.num_told_before for each in client.same)
            client.came_in_outage = any(each.came_in_outage for each in client.same)

    def _happen(self, fault: Fault) -> None:
        kind = (FAULTS | GATEWAY_FAULTS)[fault.kind]
        has_happened = kind.happen(self, fault.detail)
        if has_happened:
            self._faults.add(fault.kind, kind)
        self.world.note(
            "world", f"fault {fault.number}: {fault.kind}" + ("" if has_happened else ", which hits nothing")
        )

    def _write_back(self) -> None:
        self.logs.write_back()
        while (
            self.clients
            and self.clients[0].is_over
            and self.clients[0].process.ended_ns + _FORGET_NS < self.world.now_ns
        ):
            client = self.clients.pop(0)
            self._check_client(client)
            self._take_in(client)
        self.world.after(_WRITE_BACK_NS, self._write_back)

    def _stop_faults(self) -> None:
        self.world.disk.faults = DiskFaults()
        self.world.spawn_faults = SpawnFaults()
        if self.keys is not None:
            self.operator.write(KEYS, self.keys.content, replaces=True)
        if self.gateway is not None:
            self.gateway.heal()
        for process in self.world.processes:
            process.death = self._plan.deaths.get(process.name)

    def administer(self, action: AdminAction) -> None:
        """Have an operator request an action."""

        async def act() -> None:
            engine = self.server.engine
            # This server may not have what the action names, and one that has just started may have no engine yet.
            with contextlib.suppress(EventLMError):
                if engine is not None:
                    await engine.administer(action)
                    self.world.faults[f"{type(action).__name__} done"] += 1

        loop = self.server.process.loop
        loop.call_soon(lambda: loop.create_task(act()))

    def _check_rest(self) -> None:
        """Check that every client was served or told why not, and that nothing is left of any request."""
        for client in self.clients:
            self._check_client(client)
        engine = self.server.engine
        assert engine is not None
        state = engine._require_engine_core().core.state
        self.world.run(lambda: not state.requests, most_seconds=REST_SECONDS)
        for replica in state.replicas:
            self.checks.check(
                "no block is left",
                replica.pool.num_available == replica.pool.num_blocks,
                f"replica {replica.index}: {replica.pool.num_available} of {replica.pool.num_blocks} are available",
            )
        self.world.run_for(5)
        if self.gateway is not None:
            self._serve_last(self.gateway)
        elif self._plan.faults and not self._plan.deaths and not self.config.model.fake.get("poison_ppm"):
            # An operator may still have to undo the last action.
            self.world.run_for(20)
            self._come_last(most_seconds=REST_SECONDS)
            self.world.run_for(5)
        if not self._plan.deaths:
            metrics = read_page(self.world, ADDRESS, "/metrics")
            check_gauges(self.checks, metrics, num_backends=len(self.gateway.backends) if self.gateway else 0)
            Privacy(self.clients, self.checks).check("the metrics", metrics.encode())
            self._secrets.check("the metrics", metrics.encode())
            if self.keys is not None:
                for path in ("/admin/status", "/admin/backends"):
                    page = read_page(self.world, ADDRESS, path, self.keys.operator.sent.headers)
                    self._secrets.check(path, page.encode())
        # Resumable streams go on, and their texts are kept, for as long as was promised.
        has_keys = any(each.idempotency_key for each in self._plan.visits)
        self.world.run_for(self.config.server.resume_seconds or RUN_ON_SECONDS * has_keys)
        if self.config.record.recover:
            # If a server has died meanwhile, the next one keeps replies for as long again.
            self.world.run(lambda: self.lives.keeps_nothing, most_seconds=REST_SECONDS)
            self.world.run_for(_FORGET_SECONDS)
            self.world.run(lambda: self.lives.is_well, most_seconds=REST_SECONDS)
            self.lives.recoveries.check_rest()
        engine = self.server.engine
        assert engine is not None
        num_bytes = engine.registry.num_bytes
        self.checks.check("no reply is kept for ever", not num_bytes, f"{num_bytes} bytes")
        own = set(self.server.processes)
        for process in own:
            handles = [each for each in process.handles.values() if isinstance(each, Socket)]
            left = [each for each in handles if each.peer is None or not each.peer.holders & own]
            if self.gateway is not None:
                left = [each for each in left if not self.gateway.is_idle(each)]
            self.checks.check("no connection is left", not left, f"{len(left)} of {process.name}")
        for front_end in self.server.front_ends:
            self.checks.check("front ends forget", not front_end.left(), front_end.left())
        self.world.run(lambda: self.lives.is_well, most_seconds=REST_SECONDS)
        self.leaks.check_rest()

    def _check_client(self, client: Client) -> None:
        check_client(client, self.checks)
        check_let_in(client, self.checks)
        self._joins.check_client(client)
        was_ended = any(each.ended is not None for each in client.same)
        if self._plan.is_calm and not (client.was_disturbed or client.was_dropped or client.was_refused or was_ended):
            reply = client.reply
            is_over = reply.is_done if client.visit.body["stream"] else reply.is_whole
            self.checks.check(
                "no faults, no errors",
                reply.status == 200 and is_over and b'"error"' not in reply.body,
                f"visit {client.visit.number}: {reply.status} {bytes(reply.body[-200:])!r}",
            )

    def _come_last(self, *, most_seconds: float) -> None:
        """Check that one more request is served."""
        self._come(self._plan.last_visit)
        last = self.clients[-1]
        self.world.run(lambda: last.is_over, most_seconds=most_seconds)
        check_client(last, self.checks)
        told = f"{last.reply.status} {bytes(last.reply.body)!r}"
        self.checks.check("served once all is well", last.reply.is_done and b'"error"' not in last.reply.body, told)

    def _serve_last(self, gateway: Gateway) -> None:
        """Check that once all is well, and all backends are there and were probed, requests are served."""
        probe_ms = self._plan.config.gateway.probe_interval_ms
        self.world.run_for(60 + 2 * probe_ms / 1000)
        for spec in gateway.specs:
            # A backend may have been added again while it was still being removed.
            self.administer(AddBackend(spec=spec))
        self.world.run_for(10)
        self._come_last(most_seconds=60)
        # Idle connections are closed within twice their time.
        self.world.run_for(10)
        assert self.server.engine is not None
        gateway.check_rest(self.checks, self.server.engine, probe_ms)

    def _check_end(self) -> None:
        """Check that no process is left, and that none has met a defect."""
        is_killed = self.server.process.returncode == -SIGKILL and self._plan.deaths
        self.checks.check(
            "the server ends in order", self.server.process.returncode == 0 or bool(is_killed), "it failed"
        )
        left = [each.name for each in self.world.processes]
        self.checks.check("no process is left", not left, f"{left}")
        defects = [line for line in self.lines if "defect" in str(line.get("event", ""))]
        self.watch.check_wrong()
        self._secrets.check_all(self.lines, self.world.disk.tree)
        self.checks.check("no defect is logged", not defects, f"{defects}")
        self.leaks.check_ends()
        self.checks.check("no error is unheard", not self.world.errors, f"{self.world.errors}")

    def _take_in(self, client: Client) -> None:
        """Add what a client received to the seed's digest and statuses."""
        self._statuses[str(client.reply.status)] += 1
        self._secrets.check_client(client)
        for reply in client.replies:
            self._digest.update(f"{client.visit.number} {reply.status} {len(reply.body)}\n".encode())
            self._digest.update(bytes(reply.body))

    def _add_up(self) -> None:
        for client in self.clients:
            self._take_in(client)
        for file in self.world.disk.tree.files():
            self._digest.update(bytes(file.content))
        self._digest.update(f"{self.world.draws.num_drawn} draws up to {self.world.now_ns}".encode())
