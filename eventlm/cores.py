"""How many processors this process may keep busy."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cores(cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int:
    """Those that it may run on, or as many as its control groups (version 2) give it the time of, at least 1.

    A container on a large machine sees all of its processors; threads for each of them would wait for each other most
    of the time.
    """
    cores = len(os.sched_getaffinity(0))
    for quota in _quotas(cgroups, membership):
        cores = min(cores, max(int(quota), 1))
    return cores


def _quotas(cgroups: Path, membership: Path) -> list[float]:
    """Processors' worth of time by each limit from the process's group upwards."""
    try:
        lines = membership.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    own = cgroups / path
    quotas = []
    for group in (own, *own.parents):
        if not group.is_relative_to(cgroups):
            break
        try:
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
            quotas.append(float(quota) / float(period))
        except (OSError, ValueError):
            # No file at the root outside of containers; "max" is no number, and no limit.
            continue
    return quotas
