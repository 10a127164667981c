"""The backends of a run: what happens to them, and what they and the gateway's log must show in the end."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from eventlm.bus.log_reader import LogReader
from eventlm.config.backends import BackendSpec, parse_backend
from eventlm.config.structs import GatewayConfig
from eventlm.core.state.backend_state import GIVEN_PPM, RETRY_PPM
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.errors import EventLMError
from eventlm.events import Arrived, Forwarded, RetrySet, Streamed
from eventlm.system.disk import Disk
from eventlm.types import SequenceId
from tests.world.invariants.checks import Checks
from tests.world.machine.network import Handle, Socket
from tests.world.machine.world import World
from tests.world.plans.gateway_plan import LIST, NAME, GatewayPlan
from tests.world.programs.backends import WorldBackend
from tests.world.programs.operator import Operator


class Gateway:
    """The backends, from the start on. specs: how the gateway reaches them."""

    def __init__(self, world: World, plan: GatewayPlan, operator: Operator) -> None:
        self._world = world
        self.plan = plan
        self.backends = [WorldBackend(world, each) for each in plan.backends]
        common = BackendSpec(url="", key=plan.key)
        parsed = [parse_backend(each, common=common) for each in plan.specs]
        self.specs = [each for each in parsed if isinstance(each, BackendSpec)]
        self._operator = operator
        self.write_list()
        world.network.names[NAME] = {each.host: True for each in plan.backends}

    def one(self, detail: int) -> WorldBackend:
        """One of them."""
        return self.backends[detail % len(self.backends)]

    def connections(self, backend: WorldBackend) -> list[Socket]:
        """The gateway's ends of those to it."""
        return [
            each.peer
            for each in backend.process.handles.values()
            if isinstance(each, Socket) and each.peer is not None and each.peer.holders
        ]

    def list_in_dns(self, host: str, *, is_there: bool) -> None:
        """An address is in DNS, or is not any more."""
        self._world.network.names[NAME][host] = is_there

    def write_list(self, specs: list[str] | None = None, *, cut_to: int | None = None, replaces: bool = False) -> None:
        """An operator writes a list of backends. specs: None: of all. cut_to: of its bytes. replaces: see Operator."""
        content = "".join(f"{each}\n" for each in (self.plan.specs if specs is None else specs)).encode()
        self._operator.write(LIST, content[:cut_to], replaces=replaces)

    def remove_list(self) -> None:
        """An operator removes it."""
        self._operator.remove(LIST)

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        self.write_list()
        for each in self.backends:
            each.heal()
            self.list_in_dns(each.plan.host, is_there=True)

    def stop(self, checks: Checks) -> None:
        """End the backends, which the gateway has left."""
        self._world.run_for(5)
        for each in self.backends:
            num_open = len(each.process.handles) - 1
            checks.check("no connection is left at a backend", not num_open, f"{each.plan.host}: {num_open}")
            each.process.end(0)

    def is_idle(self, handle: Handle) -> bool:
        """Whether it is a kept connection to a backend that is there, or one that a probe makes just now."""
        if not isinstance(handle, Socket):
            return False
        return handle.peer is None or any(handle.peer.holders == {each.process} for each in self.backends)

    def check_rest(self, checks: Checks, engine: InferenceEngine, interval_ms: int) -> None:
        """Nothing is left of any request, here or there. interval_ms: between probes."""
        forwarder = engine._backends
        checks.check("no attempt is left", not forwarder._under_way, f"{forwarder._under_way}")
        for number, backends in forwarder.sets.items():
            for index, controller in backends._controllers.items():
                where = f"set {number}, replica {index}"
                checks.check("no attempt is left", not controller.num_attempts, f"{where}: {controller.num_attempts}")
                num_ending = len(controller.backend._ending)  # type: ignore[attr-defined]
                checks.check("no reply is left", not num_ending, f"{where}: {num_ending}")
        for each in self.backends:
            num_left = each.stub.num_running + each.stub.num_waiting
            checks.check("no request is left at a backend", not num_left, f"{each.plan.host}: {num_left}")
            num_open = len(self.connections(each))
            # Probes use each of those that are kept in turn, and so keep them.
            most = 1 + 5000 // interval_ms
            checks.check("no connection to a backend is left", num_open <= most, f"{each.plan.host}: {num_open}")


def check_attempts(checks: Checks, run_folder: Path | None, disk: Disk, config: GatewayConfig) -> None:
    """Attempts of a whole log keep to the rules."""
    most, share_ppm = 1 + config.forward_retries, config.retry_budget_percent * 10_000
    if run_folder is None:
        return
    try:
        with LogReader(run_folder, disk=disk) as reader:
            lines = [*reader]
    except EventLMError:
        return
    if reader.gaps:
        return
    arrived: dict[int, Arrived] = {}
    num_attempts: Counter[SequenceId] = Counter()
    shown: set[SequenceId] = set()
    num_first = num_more = 0
    for line in lines:
        match line.event():
            case Arrived() as event:
                arrived[event.s] = event
            case Streamed(rows=rows):
                shown |= {SequenceId(row[0], row[1]) for row in rows}
            case Forwarded() as event:
                identity = SequenceId(event.request, event.index)
                num_attempts[identity] += not event.hedge
                is_first = event.attempt == 1
                num_first, num_more = num_first + is_first, num_more + (not is_first)
                where = f"event {event.s}: attempt {event.attempt} of {identity}"
                checks.check("attempts are few", num_attempts[identity] <= most, where)
                paid_ppm, earned_ppm = num_more * RETRY_PPM, GIVEN_PPM + num_first * share_ppm
                checks.check("retries keep to their budget", paid_ppm <= earned_ppm, f"{where}: {num_more} more")
                deadline_ns = _deadline_ns(arrived[event.request])
                if identity not in shown and deadline_ns and arrived[event.request].scheduling.drop_if_late:
                    checks.check("nothing is sent too late", event.ts <= deadline_ns, where)
            case RetrySet() as event:
                identity = SequenceId(event.request, event.index)
                deadline_ns = _deadline_ns(arrived[event.request])
                if identity not in shown and deadline_ns:
                    where = f"event {event.s}: {identity}"
                    checks.check("no retry is due after the deadline", event.due_ns < deadline_ns, where)


def _deadline_ns(arrived: Arrived) -> int:
    deadline_ns = arrived.scheduling.deadline_ns
    return deadline_ns and arrived.ts + deadline_ns
