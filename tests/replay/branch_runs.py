"""Runs to branch from, and their drains."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.bus.run_folder import closed_segments
from eventlm.events import Fact
from eventlm.replay.branch.point import BranchPlace, BranchPoint, find_point
from eventlm.replay.verify.verifier import verify
from eventlm.system.system import real_system
from tests.bus.slow_disk import SlowDisk
from tests.engine.test_lagging_disk import Hesitant, threaded
from tests.simulation import Simulation
from tests.workload import Chaos

SEGMENT_BYTES = 8192


def record_random(folder: Path, seed: int, *, segment_bytes: int = 0) -> Path:
    """A random workload with all that may go wrong, in one file or many."""
    with LogWriter(real_system(), folder, f"seed-{seed}", segment_bytes=segment_bytes) as writer:
        Simulation(seed, writer=writer, chaos=Chaos(recoveries=seed % 3), check_every=0).run()
        return writer.run_folder


def record_with_gap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random workload whose disk was too slow now and then."""
    disk = SlowDisk(monkeypatch)
    for seed in range(12):
        writer = LogWriter(real_system(), folder, f"{seed}", segment_bytes=SEGMENT_BYTES)
        Simulation(seed, recorder=threaded(writer, Hesitant, disk=disk, seed=seed), check_every=0).run()
        if verify(writer.run_folder).num_missing and not is_speculative(writer.run_folder):
            return writer.run_folder
    raise AssertionError("no run has a gap")


def is_speculative(path: Path) -> bool:
    """Whether rows may produce several tokens."""
    with LogReader(path) as log:
        return log.header.core.max_tokens_per_row > 1


def without_first_half(run: Path) -> Path:
    """The run after the older half of its closed segments has been removed."""
    closed = closed_segments(run)
    for segment in closed[: len(closed) // 2]:
        segment.path.unlink()
    return run


def drain_ends(path: Path) -> list[int]:
    """The positions of the marked facts."""
    with LogReader(path) as log:
        events = (line.event() for line in log)
        return [event.s for event in events if isinstance(event, Fact) and event.p]


def random_points(path: Path, count: int, chance: random.Random) -> Iterator[BranchPoint]:
    """So many of the drains of a run, or all if it has fewer."""
    ends = drain_ends(path)
    for s in chance.sample(ends, min(count, len(ends))):
        yield find_point(path, BranchPlace(event=s))
