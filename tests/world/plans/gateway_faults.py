"""Faults of a gateway's backends, of the network to them, and actions of operators on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from eventlm.engine.backends.actions import AddBackend, DrainBackend, RemoveBackend, ResumeBackend
from tests.world.machine.world import SECOND
from tests.world.plans.failures import disk_fault
from tests.world.plans.faults import FaultKind
from tests.world.plans.gateway_plan import LIST, PORT

if TYPE_CHECKING:
    from tests.world.gateway import Gateway
    from tests.world.programs.backends import WorldBackend
    from tests.world.run import Run


def _on_backend(
    act: Callable[[Run, Gateway, WorldBackend, int], bool],
) -> Callable[[Run, int], bool]:
    """A fault that happens to one of the backends, if there are any. It gets the rest of the drawn number."""

    def happen(run: Run, detail: int) -> bool:
        gateway = run.gateway
        return gateway is not None and act(run, gateway, gateway.one(detail), detail // len(gateway.backends))

    return happen


def _kill(run: Run, gateway: Gateway, backend: WorldBackend, detail: int) -> bool:
    """Kill a backend, and start it again within a minute."""
    if backend.process.is_dead:
        return False
    backend.process.end(-9)
    run.world.after(detail % 60 * SECOND, backend.start_again)
    return True


def _freeze(run: Run, gateway: Gateway, backend: WorldBackend, detail: int) -> bool:
    backend.process.freeze(detail % 60 * SECOND)
    return not backend.process.is_dead


def _cut(run: Run, gateway: Gateway, backend: WorldBackend, detail: int) -> bool:
    """Cut one of the backend's connections, or all of them."""
    found = gateway.connections(backend)
    if found and detail % 2:
        found = [found[detail % len(found)]]
    for each in found:
        each.cut()
    return bool(found)


def _hold(run: Run, gateway: Gateway, backend: WorldBackend, detail: int) -> bool:
    """Let nothing through to the backend for a while."""
    until_ns = run.world.now_ns + detail % 40 * SECOND
    run.world.network.held_until_ns[(backend.plan.host, PORT)] = until_ns
    for each in gateway.connections(backend):
        each.hold(until_ns)
    return True


def _drain(run: Run, gateway: Gateway, backend: WorldBackend, detail: int) -> bool:
    name = f"{backend.plan.host}:{PORT}"
    run.administer(DrainBackend(name=name))
    run.world.after(detail % 30 * SECOND, lambda: run.administer(ResumeBackend(name=name)))
    return True


def _remove(run: Run, gateway: Gateway, backend: WorldBackend, detail: int) -> bool:
    """Remove the backend, and add it again after a while."""
    spec = next(each for each in gateway.specs if each.name == f"{backend.plan.host}:{PORT}")
    run.administer(RemoveBackend(name=spec.name))
    run.world.after(detail % 30 * SECOND, lambda: run.administer(AddBackend(spec=spec)))
    return True


def _leave_dns(run: Run, gateway: Gateway, backend: WorldBackend, detail: int) -> bool:
    gateway.list_in_dns(backend.plan.host, is_there=False)
    run.world.after(detail % 30 * SECOND, lambda: gateway.list_in_dns(backend.plan.host, is_there=True))
    return gateway.plan.listing == "DNS"


def _rewrite_list(run: Run, gateway: Gateway, backend: WorldBackend, detail: int) -> bool:
    """Have an operator write a wrong list of backends, and the right one after a while."""
    specs, kind = gateway.plan.specs, detail % 6
    if kind == 0:
        # The operator's editor has written only part of the file.
        gateway.write_list(cut_to=detail // 6 % 100)
    elif kind == 1:
        gateway.write_list([])
    elif kind == 2:
        gateway.write_list([*specs, "to be done"])
    elif kind == 3:
        gateway.remove_list()
    else:
        fewer = [each for each in specs if backend.plan.host not in each]
        gateway.write_list([*fewer, "http://10.0.0.9:9000"], replaces=kind == 5)
    run.world.after(detail % 30 * SECOND, lambda: gateway.write_list(replaces=detail % 2 == 0))
    return gateway.plan.listing == "file"


_hide_list = disk_fault(lambda run, detail: {"unreadable": frozenset({LIST})})


def _lock_list(run: Run, gateway: Gateway, backend: WorldBackend, detail: int) -> bool:
    """Make the list unreadable for the gateway for a while."""
    return _hide_list(run, detail) and gateway.plan.listing == "file"


def _change_key(run: Run, gateway: Gateway, backend: WorldBackend, detail: int) -> bool:
    """Have the backend require another key for a while."""
    stub = backend.stub
    if not stub.key:
        return False
    stub.key = "sk-another"

    def change_back() -> None:
        stub.key = gateway.plan.key

    run.world.after(detail % 30 * SECOND, change_back)
    return True


GATEWAY_FAULTS = {
    "kill backend": FaultKind(4, _on_backend(_kill)),
    "freeze backend": FaultKind(2, _on_backend(_freeze), ("backend frozen",)),
    "cut connection to backend": FaultKind(3, _on_backend(_cut)),
    "hold network to backend": FaultKind(2, _on_backend(_hold), ("held ",)),
    "drain backend": FaultKind(1, _on_backend(_drain), ("DrainBackend done",)),
    "remove backend": FaultKind(1, _on_backend(_remove), ("RemoveBackend done",)),
    "leave DNS": FaultKind(2, _on_backend(_leave_dns), ("name without an address",)),
    "change key of backend": FaultKind(2, _on_backend(_change_key)),
    "rewrite list": FaultKind(3, _on_backend(_rewrite_list)),
    "unreadable list": FaultKind(1, _on_backend(_lock_list), (f"refused to open {LIST.name}",)),
}
