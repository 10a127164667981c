"""Failures of the server's processes, its host and its disk. Those that last have an end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.world.machine.disk_faults import DiskFaults
from tests.world.machine.process import SIGKILL, Death, When
from tests.world.machine.spawn_faults import SpawnFaults
from tests.world.plans.keys_plan import KEYS
from tests.world.programs import front_ends, workers

if TYPE_CHECKING:
    from tests.world.machine.process import Process
    from tests.world.run import Run

#: The modules whose processes fail to start; empty: all of them.
_MODULES = (workers.MODULE, front_ends.MODULE, "")
_SECOND = 1_000_000_000
#: The process dies within this many calls.
_CALLS_TO_DEATH = 400
#: The longest time in seconds for which a disk or starts of processes fail, or a host is suspended.
_MOST_SECONDS = 90


def kill_server(run: Run, detail: int) -> bool:
    """Kill the server at this moment."""
    process = run.server.process
    if process.is_dead:
        return False
    process.end(-SIGKILL)
    return True


def kill_server_in_call(run: Run, detail: int) -> bool:
    """Kill the server at one of its next calls into the system."""
    process = run.server.process
    _die_soon(process, detail)
    return not process.is_dead


def kill_child_in_call(run: Run, detail: int) -> bool:
    """Kill one of the server's children at one of its next calls into the system."""
    children = run.lives.children()
    if children:
        _die_soon(children[detail % len(children)], detail // 8)
    return bool(children)


def _die_soon(process: Process, detail: int) -> None:
    whens: tuple[When, ...] = ("before", "halfway", "after")
    process.death = Death(process.num_calls + 1 + detail // 3 % _CALLS_TO_DEATH, whens[detail % 3])


def reboot(run: Run, detail: int) -> bool:
    """Cut the power of the server's host. Its wall clock may differ afterwards."""
    run.lives.reboot()
    if detail % 2:
        run.world.wall_offset_ns += (detail - 500_000) * _SECOND
    return True


def suspend(run: Run, detail: int) -> bool:
    """Suspend the server's host, or pause it if it is a virtual machine."""
    return run.lives.suspend(detail % _MOST_SECONDS * _SECOND, stops_clock=detail // _MOST_SECONDS % 2 == 0)


def failing_starts(run: Run, detail: int) -> bool:
    """Make processes fail to start for a while. Usually some are killed, so that they have to be restarted."""
    world, module = run.world, _MODULES[detail % len(_MODULES)]
    world.spawn_faults = SpawnFaults(1 + detail // 8 % 3, module)
    for child in run.lives.children()[: detail // 64 % 8]:
        if child.name.startswith(module):
            child.end(-SIGKILL)

    def end() -> None:
        world.spawn_faults = SpawnFaults()

    world.after((1 + detail % _MOST_SECONDS) * _SECOND, end)
    return True


def disk_fault(make: Callable[[Run, int], dict[str, Any]]) -> Callable[[Run, int], bool]:
    """A fault that sets these fields of the disk's faults for a while."""

    def happen(run: Run, detail: int) -> bool:
        world, fields = run.world, make(run, detail)
        world.disk.faults = world.disk.faults._replace(**fields)

        def end() -> None:
            usual = DiskFaults()
            world.disk.faults = world.disk.faults._replace(**{name: getattr(usual, name) for name in fields})

        world.after((1 + detail % _MOST_SECONDS) * _SECOND, end)
        return True

    return happen


full = disk_fault(lambda run, detail: {"capacity": run.world.disk.num_bytes + detail % 50_000})
read_only = disk_fault(lambda run, detail: {"is_read_only": True})
short_writes = disk_fault(lambda run, detail: {"short_writes": 1 + detail % 4})
failing = disk_fault(lambda run, detail: {"errors": 1 + detail % 20, "sync_errors": 1 + detail % 3})
failing_syncs = disk_fault(lambda run, detail: {"sync_errors": 1 + detail % 5})
without_links = disk_fault(lambda run, detail: {"has_links": False})
slow = disk_fault(
    lambda run, detail: {"slow": 1 + detail % 30, "most_slow_ns": 1_000_000 * (1 + detail % 3_000)},
)


def restart_on_failing_disk(run: Run, detail: int) -> bool:
    """Kill the server, and make the disk fail while the next one starts."""
    return failing(run, detail) and kill_server(run, detail)


def bit_rot(run: Run, detail: int) -> bool:
    """Flip a bit of a closed segment."""
    return run.logs.rot(detail)


def rewrite_keys(run: Run, detail: int) -> bool:
    """Have an operator break or remove the key file, and correct it after a while."""
    keys = run.keys
    if keys is None:
        return False
    match detail % 3:
        case 0:
            run.operator.remove(KEYS)
        case 1:
            run.operator.write(KEYS, keys.content + b"to be done\n", replaces=True)
        case _:
            run.operator.write(KEYS, b"", replaces=True)
    run.world.after(detail % _MOST_SECONDS * _SECOND, lambda: run.operator.write(KEYS, keys.content, replaces=True))
    return True


_hide_keys = disk_fault(lambda run, detail: {"unreadable": frozenset({KEYS})})


def hide_keys(run: Run, detail: int) -> bool:
    """Have an operator rewrite the key file, and make it unreadable for a while."""
    if run.keys is not None:
        run.operator.write(KEYS, run.keys.content, replaces=True)
    return _hide_keys(run, detail) and run.keys is not None
