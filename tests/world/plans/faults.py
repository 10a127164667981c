"""The faults that happen at drawn times, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from eventlm.engine.admin import AdminAction, Drain, FlushCache, Pause, Resume, SwapPolicy
from tests.world.plans import failures
from tests.world.plans.keys_plan import KEYS
from tests.world.programs import front_ends, workers

if TYPE_CHECKING:
    from tests.world.machine.process import Process
    from tests.world.run import Run

_SECOND = 1_000_000_000
#: One policy is in force at the start, and operators swap in the others.
POLICIES = ("fcfs", "edf", "lrs")


class FaultKind(NamedTuple):
    """A kind of fault. weight: how often it is drawn, relative to the others. happen: makes it happen, with a number
    below a million from which it draws its details; False if there is nothing to hit.

    hits: prefixes of the names under which the world counts its effects. The fault has struck once one of them is
    counted; without any, it strikes at once.
    """

    weight: int
    happen: Callable[[Run, int], bool]
    hits: tuple[str, ...] = ()


def _one_of(processes: list[Process], detail: int) -> Process | None:
    return processes[detail % len(processes)] if processes else None


def _child(module: str, act: Callable[[Process, int], None]) -> Callable[[Run, int], bool]:
    """A fault that happens to one of the engine's children that run a module."""

    def happen(run: Run, detail: int) -> bool:
        children = run.lives.children()
        child = _one_of([each for each in children if each.name.startswith(module)], detail)
        if child is not None:
            act(child, detail)
        return child is not None

    return happen


def _kill(process: Process, detail: int) -> None:
    process.end(-9)


def _freeze(process: Process, detail: int) -> None:
    process.freeze(detail % 40 * _SECOND)


def _freeze_for_long(process: Process, detail: int) -> None:
    """Freeze a process for so long that it may be considered dead."""
    process.freeze(detail % 90 * _SECOND)


def _slow(process: Process, detail: int) -> None:
    process.slow_until(process.world.now_ns + detail % 10 * _SECOND, 20)


def _freeze_engine(run: Run, detail: int) -> bool:
    run.server.process.freeze(detail % 30_000 * _SECOND // 1000)
    return True


def _slow_engine(run: Run, detail: int) -> bool:
    _slow(run.server.process, detail)
    return True


def _cut_connection(run: Run, detail: int) -> bool:
    clients = [each for each in run.clients if not each.is_over and each.reply.is_under_way]
    if clients:
        clients[detail % len(clients)].cut()
    return bool(clients)


def _set_wall_clock(run: Run, detail: int) -> bool:
    run.world.wall_offset_ns += (detail - 500_000) * _SECOND
    return True


def _slow_subscriber(run: Run, detail: int) -> bool:
    return run.watch.subscribe(detail)


def _operator(action: Callable[[int], AdminAction], *, is_undone: bool = False) -> Callable[[Run, int], bool]:
    """A fault by which an operator requests an action and, if is_undone, the end of it within 20 s."""

    def happen(run: Run, detail: int) -> bool:
        run.administer(action(detail))
        if is_undone:
            run.world.after(detail % 20 * _SECOND, lambda: run.administer(Resume()))
        return True

    return happen


FAULTS = {
    "kill worker": FaultKind(4, _child(workers.MODULE, _kill)),
    "freeze worker": FaultKind(1, _child(workers.MODULE, _freeze), (f"{workers.MODULE} frozen",)),
    "kill front end": FaultKind(4, _child(front_ends.MODULE, _kill)),
    "freeze front end": FaultKind(2, _child(front_ends.MODULE, _freeze_for_long), (f"{front_ends.MODULE} frozen",)),
    "slow front end": FaultKind(1, _child(front_ends.MODULE, _slow), (f"{front_ends.MODULE} slowed",)),
    "freeze engine": FaultKind(2, _freeze_engine, ("engine frozen",)),
    "slow engine": FaultKind(1, _slow_engine, ("engine slowed",)),
    "kill server": FaultKind(2, failures.kill_server),
    "kill server in a call": FaultKind(2, failures.kill_server_in_call, ("engine killed",)),
    "kill child in a call": FaultKind(
        2, failures.kill_child_in_call, (f"{workers.MODULE} killed", f"{front_ends.MODULE} killed")
    ),
    "restart on failing disk": FaultKind(1, failures.restart_on_failing_disk),
    "reboot": FaultKind(1, failures.reboot),
    "suspend": FaultKind(
        2,
        failures.suspend,
        ("engine suspended", f"{workers.MODULE} suspended", f"{front_ends.MODULE} suspended"),
    ),
    "failing starts": FaultKind(
        2, failures.failing_starts, (f"{workers.MODULE} start ", f"{front_ends.MODULE} start ")
    ),
    "full disk": FaultKind(1, failures.full, ("full", "no room")),
    "read-only disk": FaultKind(1, failures.read_only, ("read-only",)),
    "short writes": FaultKind(1, failures.short_writes, ("short write",)),
    "failing disk": FaultKind(1, failures.failing, ("error of ",)),
    "failing syncs": FaultKind(1, failures.failing_syncs, ("error of sync",)),
    "disk without links": FaultKind(1, failures.without_links, ("no links",)),
    "slow disk": FaultKind(2, failures.slow, ("slow ",)),
    "bit rot": FaultKind(1, failures.bit_rot, ("rotten log",)),
    "rewrite keys": FaultKind(1, failures.rewrite_keys),
    "unreadable keys": FaultKind(1, failures.hide_keys, (f"refused to open {KEYS.name}",)),
    "cut connection": FaultKind(4, _cut_connection),
    "set wall clock": FaultKind(1, _set_wall_clock),
    "slow subscriber": FaultKind(2, _slow_subscriber, ("subscriber lagged",)),
    "pause": FaultKind(2, _operator(lambda _: Pause(), is_undone=True), ("Pause done",)),
    "drain": FaultKind(1, _operator(lambda _: Drain(), is_undone=True), ("Drain done",)),
    "swap policy": FaultKind(
        1, _operator(lambda detail: SwapPolicy(POLICIES[detail % len(POLICIES)])), ("SwapPolicy done",)
    ),
    "flush cache": FaultKind(1, _operator(lambda _: FlushCache()), ("FlushCache done",)),
}
