"""One seed from its start to its rest: the server starts, clients come, faults happen, all ends, and is checked."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import structlog
import xxhash
from msgspec import Struct

from eventlm.bus.log_reader import LogReader
from eventlm.config import Config
from eventlm.engine.admin import AdminAction
from eventlm.errors import EventLMError
from tests.world.checks import Checks
from tests.world.client import Client
from tests.world.faults import FAULTS
from tests.world.loop import Killed
from tests.world.network import Socket
from tests.world.plan import Fault, Plan
from tests.world.server import ADDRESS, RUNS, WorldServer
from tests.world.world import SECOND, World

MAX_MODEL_LEN = 512
#: Once faults have stopped, all that can be served is served within this time.
REST_SECONDS = 900


class Ran(Struct, frozen=True):
    """A seed that was run. digest: of all bytes that clients got, of the log and of the last draw. faults: those that
    happened, by kind; checks: invariants that were checked, by name.
    """

    seed: int
    simulated_seconds: float
    cpu_seconds: float
    num_requests: int
    num_events: int
    digest: str
    faults: dict[str, int]
    checks: dict[str, int]
    statuses: dict[str, int]


def run_plan(plan: Plan) -> Ran:
    """Run it. Raises AssertionError for what must not be."""
    with quiet() as lines:
        return Run(plan, lines).run()


@contextlib.contextmanager
def quiet() -> Iterator[list[dict[str, Any]]]:
    """The log of all processes, as a list. The collector runs at fixed points only: what it finalizes may act, and what
    is left of a dead process tries to end in order, and cannot.
    """
    lines: list[dict[str, Any]] = []
    before, hear_before = structlog.get_config(), sys.unraisablehook

    def hear(error: Any) -> None:
        if not isinstance(error.exc_value, Killed):
            hear_before(error)

    def keep(_: Any, level: str, line: Any) -> str:
        lines.append({**line, "level": level})
        raise structlog.DropEvent

    structlog.configure(processors=[keep], cache_logger_on_first_use=False)
    sys.unraisablehook = hear
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield lines
    finally:
        gc.collect()
        gc.unfreeze()
        gc.enable()
        sys.unraisablehook = hear_before
        structlog.configure(**before)


class Run:
    """A plan under way."""

    def __init__(self, plan: Plan, lines: list[dict[str, Any]]) -> None:
        self._plan = plan
        self._lines = lines
        self._checks = Checks()
        self.world = World(plan.seed)
        self.clients: list[Client] = []
        self.server = self._start(plan.config)

    def _start(self, config: Config) -> WorldServer:
        return WorldServer(self.world, config, num_blocks=self._plan.num_blocks, max_model_len=MAX_MODEL_LEN)

    def run(self) -> Ran:
        """From start to rest."""
        began = time.process_time()
        plan, world = self._plan, self.world
        begin_ns = world.now_ns
        world.run(lambda: self.server.is_ready, most_seconds=60)
        origin_ns = world.now_ns
        for visit in plan.visits:
            world.at(origin_ns + visit.at_ns, lambda visit=visit: self._come(visit))
        for fault in plan.faults:
            world.at(origin_ns + fault.at_ns, lambda fault=fault: self._happen(fault))
        world.run_for(plan.seconds)
        world.run(lambda: all(each.is_over for each in self.clients), most_seconds=REST_SECONDS)
        self._check_rest()
        self.server.terminate()
        world.run(lambda: self.server.process.is_dead, most_seconds=REST_SECONDS)
        world.run_for(5)
        self._check_end()
        return Ran(
            seed=plan.seed,
            simulated_seconds=(world.now_ns - begin_ns) / SECOND,
            num_requests=len(plan.visits),
            num_events=self._check_log(),
            digest=self._digest(),
            faults=dict(world.faults),
            checks=dict(self._checks.counts),
            statuses=dict(Counter(str(each.reply.status) for each in self.clients)),
            cpu_seconds=time.process_time() - began,
        )

    def _come(self, visit: Any) -> None:
        self.clients.append(Client(self.world, visit, ADDRESS))

    def _happen(self, fault: Fault) -> None:
        has_happened = FAULTS[fault.kind].happen(self, fault.detail)
        self.world.faults[fault.kind] += has_happened
        self.world.note(
            "world", f"fault {fault.number}: {fault.kind}" + ("" if has_happened else ", which hits nothing")
        )

    def administer(self, action: AdminAction) -> None:
        """An operator asks for something."""

        async def act() -> None:
            assert self.server.engine is not None
            # It may be one that this server has not.
            with contextlib.suppress(EventLMError):
                await self.server.engine.administer(action)

        loop = self.server.process.loop
        loop.call_soon(lambda: loop.create_task(act()))

    def _check_rest(self) -> None:
        """Everybody was served or told why, and nothing is left of it."""
        for client in self.clients:
            client.check(self._checks)
            if self._plan.is_calm and not (client.was_disturbed or client.was_dropped):
                self._checks.check(
                    "no faults, no errors",
                    client.reply.status == 200 and client.reply.is_whole,
                    f"visit {client.visit.number}: {client.reply.status} {bytes(client.reply.body[:200])!r}",
                )
        engine = self.server.engine
        assert engine is not None
        state = engine._require_engine_core().core.state
        self.world.run(lambda: not state.requests, most_seconds=REST_SECONDS)
        for replica in state.replicas:
            self._checks.check(
                "no block is left",
                replica.pool.num_available == replica.pool.num_blocks,
                f"replica {replica.index}: {replica.pool.num_available} of {replica.pool.num_blocks} are available",
            )
        self.world.run_for(5)
        own = set(self.server.processes)
        for process in own:
            handles = [each for each in process.handles.values() if isinstance(each, Socket)]
            left = [each for each in handles if each.peer is None or not each.peer.holders & own]
            self._checks.check("no connection is left", not left, f"{len(left)} of {process.name}")
        for front_end in self.server.front_ends:
            if not front_end.process.is_dead:
                self._checks.check("front ends forget", not front_end.left(), front_end.left())

    def _check_end(self) -> None:
        """No process is left, and none has met a defect."""
        self._checks.check("the server ends in order", self.server.process.returncode == 0, "it failed")
        left = [each.name for each in self.world.processes]
        self._checks.check("no process is left", not left, f"{left}")
        defects = [line for line in self._lines if "defect" in str(line.get("event", ""))]
        self._checks.check("no defect is logged", not defects, f"{defects}")
        self._checks.check("no error is unheard", not self.world.errors, f"{self.world.errors}")

    def _check_log(self) -> int:
        """The log is whole, verifies, and has no text; its events."""
        from eventlm.replay.verify.verifier import verify

        disk = self.world.disk.of("reader")
        result = verify(RUNS / "latest", check_invariants=True, disk=disk)
        divergence = result.divergence
        self._checks.check("the log verifies", divergence is None, f"{divergence}")
        with LogReader(RUNS / "latest", disk=disk) as reader:
            for line in reader:
                self._checks.check("no text is in the log", b"ppp" not in line.body, f"line {line.number}")
        return result.num_events

    def _digest(self) -> str:
        digest = xxhash.xxh3_128()
        for client in self.clients:
            digest.update(bytes(client.reply.body))
        for file in self.world.disk.tree.files():
            digest.update(bytes(file.content))
        digest.update(self.world.draws.next("last").to_bytes(8))
        return digest.hexdigest()
