"""The backends of a run: what happens to them, and what they and the gateway's log must show in the end."""

from __future__ import annotations

from eventlm.config.backends import BackendSpec, parse_backend
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.gateway.client import _KEEPALIVE_SECONDS, _WITHOUT_METRICS
from tests.world.invariants.checks import Checks
from tests.world.machine.network import Handle, Socket
from tests.world.machine.world import World
from tests.world.plans.gateway_plan import LIST, NAME, PORT, GatewayPlan
from tests.world.programs.backends import WorldBackend
from tests.world.programs.operator import Operator


class Gateway:
    """The backends, which start at once. specs: how the gateway reaches them."""

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
        """One of the backends, chosen by a drawn number."""
        return self.backends[detail % len(self.backends)]

    def connections(self, backend: WorldBackend) -> list[Socket]:
        """The gateway's ends of its connections to a backend."""
        return [
            each.peer
            for each in backend.process.handles.values()
            if isinstance(each, Socket) and each.peer is not None and each.peer.holders
        ]

    def list_in_dns(self, host: str, *, is_there: bool) -> None:
        """Add an address to DNS or remove it."""
        self._world.network.names[NAME][host] = is_there

    def write_list(self, specs: list[str] | None = None, *, cut_to: int | None = None, replaces: bool = False) -> None:
        """Have an operator write the list of backends. specs: None: all backends. cut_to: write only this many bytes.
        replaces: see Operator.
        """
        content = "".join(f"{each}\n" for each in (self.plan.specs if specs is None else specs)).encode()
        self._operator.write(LIST, content[:cut_to], replaces=replaces)

    def remove_list(self) -> None:
        """Have an operator remove the list of backends."""
        self._operator.remove(LIST)

    def heal(self) -> None:
        """End all faults of backends."""
        self.write_list()
        for each in self.backends:
            each.heal()
            self.list_in_dns(each.plan.host, is_there=True)

    def stop(self, checks: Checks) -> None:
        """End the backends once the gateway has disconnected."""
        self._world.run_for(5)
        for each in self.backends:
            num_open = len(each.process.handles) - 1
            checks.check("no connection is left at a backend", not num_open, f"{each.plan.host}: {num_open}")
            each.process.end(0)

    def is_idle(self, handle: Handle) -> bool:
        """Whether a connection may be left at rest: one to a living backend, or one that a probe is just making."""
        if not isinstance(handle, Socket):
            return False
        return handle.peer is None or any(handle.peer.holders == {each.process} for each in self.backends)

    def check_rest(self, checks: Checks, engine: InferenceEngine, interval_ms: int) -> None:
        """Check that nothing is left of any request, in the gateway or in the backends. interval_ms: time between
        probes.
        """
        forwarder = engine._backends
        checks.check("no attempt is left", not forwarder._under_way, f"{forwarder._under_way}")
        kinds: dict[str, str] = {}
        for number, backends in forwarder.sets.items():
            for index, controller in backends._controllers.items():
                where = f"set {number}, replica {index}"
                kinds[controller.name] = controller.backend.facts.kind
                checks.check("no attempt is left", not controller.num_attempts, f"{where}: {controller.num_attempts}")
                num_ending = len(controller.backend._ending)  # type: ignore[attr-defined]
                checks.check("no reply is left", not num_ending, f"{where}: {num_ending}")
        own = {spec.name for spec in self.specs}
        checks.check("the backends are those that are listed", kinds.keys() == own, f"{[*kinds]}")
        for each in self.backends:
            num_left = each.stub.num_running + each.stub.num_waiting
            checks.check("no request is left at a backend", not num_left, f"{each.plan.host}: {num_left}")
            num_open = len(self.connections(each))
            # aiohttp closes an idle connection that is not used for a while. A probe uses the one that was idle
            # longest, so as many may stay open as there are probes in that time. One that a probe opens stays open in
            # any case.
            is_probed = kinds[f"{each.plan.host}:{PORT}"] not in _WITHOUT_METRICS
            most = max(round(_KEEPALIVE_SECONDS * 1000) // interval_ms, 1) if is_probed else 0
            checks.check("no connection to a backend is left", num_open <= most, f"{each.plan.host}: {num_open}")
