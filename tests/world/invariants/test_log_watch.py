"""The watch of logs sees everything, even if files are removed."""

from __future__ import annotations

from pathlib import Path

from tests.world.invariants.checks import Checks
from tests.world.invariants.log_watch import LogWatch
from tests.world.machine.disk import WorldDisk

_RUN = Path("/runs/run")


def test_what_a_segment_got_last_is_read_though_it_has_been_removed() -> None:
    world_disk = WorldDisk()
    disk = world_disk.of("engine")
    disk.make_folders(_RUN)
    watch = LogWatch(world_disk, Checks())
    first = disk.create(_RUN / "trace.jsonl")
    first.write(b"1\n2\n")
    watch.read(_RUN)
    first.write(b"3\n")
    first.close()
    disk.unlink(_RUN / "trace.jsonl")
    disk.create(_RUN / "trace.jsonl").write(b"4\n")
    watch.read(_RUN)
    assert watch.num_lines == 4
