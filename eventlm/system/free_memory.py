"""The machine's memory: all of it, and what is free."""

from __future__ import annotations

from pathlib import Path

from eventlm.errors import UsageError
from eventlm.system.processors import control_groups

_MEMINFO = Path("/proc/meminfo")
#: Of control groups in version 1, where a container sees its own as the root.
_VERSION_1 = Path("/sys/fs/cgroup/memory")


def free_bytes(meminfo: Path = _MEMINFO, groups: list[Path] | None = None, version_1: Path = _VERSION_1) -> int:
    """The kernel's estimate for the machine, or less where a control group that this process is in allows less.

    Raises UsageError if it cannot be found out.
    """
    free = _machine_bytes(meminfo, "MemAvailable")
    for group in control_groups() if groups is None else groups:
        free = min(free, _group_bytes(group / "memory.max", group / "memory.current", group / "memory.stat", free))
    limit, usage = version_1 / "memory.limit_in_bytes", version_1 / "memory.usage_in_bytes"
    return min(free, _group_bytes(limit, usage, version_1 / "memory.stat", free))


def total_bytes(meminfo: Path = _MEMINFO, groups: list[Path] | None = None, version_1: Path = _VERSION_1) -> int:
    """All the memory of the machine, or of a control group that this process is in: no process can ever get more.

    Raises UsageError if it cannot be found out.
    """
    total = _machine_bytes(meminfo, "MemTotal")
    limits = [group / "memory.max" for group in (control_groups() if groups is None else groups)]
    for limit in (*limits, version_1 / "memory.limit_in_bytes"):
        try:
            total = min(total, int(limit.read_text()))
        except (OSError, ValueError):  # no such controller, or its limit is "max"
            continue
    return total


def _machine_bytes(meminfo: Path, field: str) -> int:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise UsageError(f"{meminfo} does not say how much memory there is, and without that no model can be loaded safely")


def _group_bytes(limit: Path, usage: Path, stat: Path, unlimited: int) -> int:
    """What a control group leaves. Files that it has read count as used until their memory is needed."""
    try:
        left = int(limit.read_text()) - int(usage.read_text())
    except (OSError, ValueError):  # no such controller, or its limit is "max"
        return unlimited
    try:
        fields = dict(line.split() for line in stat.read_text().splitlines())
        left += int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
    except (OSError, ValueError):
        pass
    return max(left, 0)
