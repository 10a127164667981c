"""The faults that happen at drawn times, by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from eventlm.engine.admin import AdminAction, Drain, FlushCache, Pause, Resume, SwapPolicy

if TYPE_CHECKING:
    from tests.world.process import Process
    from tests.world.run import Run

_SECOND = 1_000_000_000
_POLICIES = ("fcfs", "edf", "lrs")


class FaultKind(NamedTuple):
    """weight: how often it is drawn, beside the others. happen: lets it happen; False if there is nothing that it could
    hit. It gets a number below a million, and makes of it what it needs.
    """

    weight: int
    happen: Callable[[Run, int], bool]


def _one_of(processes: list[Process], detail: int) -> Process | None:
    return processes[detail % len(processes)] if processes else None


def _workers(run: Run) -> list[Process]:
    return [each for each in run.world.processes if each.parent is run.server.process]


def _kill_worker(run: Run, detail: int) -> bool:
    worker = _one_of(_workers(run), detail)
    if worker is not None:
        worker.end(-9)
    return worker is not None


def _freeze_worker(run: Run, detail: int) -> bool:
    worker = _one_of(_workers(run), detail)
    if worker is not None:
        worker.freeze(detail % 40 * _SECOND)
    return worker is not None


def _freeze_engine(run: Run, detail: int) -> bool:
    run.server.process.freeze(detail % 30_000 * _SECOND // 1000)
    return True


def _slow_engine(run: Run, detail: int) -> bool:
    run.server.process.slow_until(run.world.now_ns + detail % 10 * _SECOND, 20)
    return True


def _cut_connection(run: Run, detail: int) -> bool:
    clients = [each for each in run.clients if not each.is_over]
    if clients:
        clients[detail % len(clients)].cut()
    return bool(clients)


def _set_wall_clock(run: Run, detail: int) -> bool:
    run.world.wall_offset_ns += (detail - 500_000) * _SECOND
    return True


def _operator(action: Callable[[int], AdminAction], *, is_undone: bool = False) -> Callable[[Run, int], bool]:
    """An operator asks for something, and within 20 s for its end."""

    def happen(run: Run, detail: int) -> bool:
        run.administer(action(detail))
        if is_undone:
            run.world.after(detail % 20 * _SECOND, lambda: run.administer(Resume()))
        return True

    return happen


FAULTS = {
    "kill worker": FaultKind(4, _kill_worker),
    "freeze worker": FaultKind(1, _freeze_worker),
    "freeze engine": FaultKind(2, _freeze_engine),
    "slow engine": FaultKind(1, _slow_engine),
    "cut connection": FaultKind(4, _cut_connection),
    "set wall clock": FaultKind(1, _set_wall_clock),
    "pause": FaultKind(1, _operator(lambda _: Pause(), is_undone=True)),
    "drain": FaultKind(1, _operator(lambda _: Drain(), is_undone=True)),
    "swap policy": FaultKind(1, _operator(lambda detail: SwapPolicy(_POLICIES[detail % len(_POLICIES)]))),
    "flush cache": FaultKind(1, _operator(lambda _: FlushCache())),
}
