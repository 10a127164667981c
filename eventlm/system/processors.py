"""How many processors this process may keep busy."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_PROCESSORS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
#: With more cores than so many the engine's own process has one to itself: what a worker's threads would lose by
#: having one of them interrupted in every step is more than a core gives.
_MAX_SHARED_CORES = 4


def usable_cores(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Those that it may run on, or as many as its control groups (version 2) give it the time of, at least 1.

    A container on a large machine sees all of its processors; threads for each of them would wait for each other most
    of the time.
    """
    cores = len(os.sched_getaffinity(0))
    for quota in _quotas(cgroups, membership):
        cores = min(cores, max(int(quota), 1))
    return cores


def compute_threads(num_workers: int, num_cores: int) -> int:
    """Threads of each of these workers, at least 1, where `num_cores` may be kept busy."""
    if num_cores > _MAX_SHARED_CORES:
        num_cores -= 1
    return max(num_cores // num_workers, 1)


def spread_processors(processors: Path = _PROCESSORS) -> list[int]:
    """The processors that this process may run on, one of each core before the second of any."""
    seen: dict[str, int] = {}
    order = []
    for number in sorted(os.sched_getaffinity(0)):
        try:
            siblings = (processors / f"cpu{number}/topology/thread_siblings_list").read_text(encoding="ascii").strip()
        except OSError:
            siblings = str(number)
        order.append((seen.get(siblings, 0), number))
        seen[siblings] = seen.get(siblings, 0) + 1
    return [number for _, number in sorted(order)]


def _quotas(cgroups: Path, membership: Path) -> list[float]:
    """Processors' worth of time by each limit from the process's group upwards."""
    quotas = []
    for group in control_groups(cgroups, membership):
        try:
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
            quotas.append(float(quota) / float(period))
        except (OSError, ValueError):
            # No file at the root outside of containers; "max" is no number, and no limit.
            continue
    return quotas


def control_groups(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> list[Path]:
    """The folders of the process's control group (version 2) and of those around it; none where there are none."""
    try:
        lines = membership.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    own = cgroups / path
    return [group for group in (own, *own.parents) if group.is_relative_to(cgroups)]


def deal_processors(num_workers: int, num_threads: int, nodes: Path = _NODES) -> list[list[int]]:
    """Processors of `spread_processors` for each worker's threads: all of one NUMA node, as long as one has enough.

    Empty if there are fewer than all threads.
    """
    left = spread_processors()
    if len(left) < num_workers * num_threads:
        return []
    node_of = _nodes(nodes)
    dealt = []
    for _ in range(num_workers):
        room = Counter(node_of.get(number, 0) for number in left)
        # The one with the least room, so that neighbours are on one node, too.
        fits = [(count, number) for number, count in room.items() if count >= num_threads]
        node = min(fits)[1] if fits else None
        fitting = [number for number in left if node is None or node_of.get(number, 0) == node]
        dealt.append(fitting[:num_threads])
        left = [number for number in left if number not in dealt[-1]]
    return dealt


def _nodes(nodes: Path) -> dict[int, int]:
    """The NUMA node of each processor, where the system says so."""
    return {
        int(processor.name.removeprefix("cpu")): int(node.name.removeprefix("node"))
        for node in nodes.glob("node[0-9]*")
        for processor in node.glob("cpu[0-9]*")
    }
