"""Runs that the tests of the index read: golden ones, and random ones with everything that may happen."""

from __future__ import annotations

from pathlib import Path

from eventlm.bus.log_writer import LogWriter
from eventlm.replay.index.gauges import UNSEEN_CAUSE
from eventlm.replay.index.index import Index
from eventlm.system.system import real_system
from tests.replay.backend_runs import record_backends
from tests.replay.golden import BROKEN, FOLDER, GOLDEN
from tests.replay.workload_runs import SEGMENT_BYTES, record
from tests.simulation import Simulation

GOLDEN_RUNS = [FOLDER / f"{name}.jsonl" for name in GOLDEN]
BROKEN_RUN = FOLDER / f"{BROKEN}.jsonl"
#: Of other servers, alone and on either side of own workers.
FORWARDED_SEEDS = (9, 13, 14, 18)
#: Every fifth is in many segments.
SEEDS = (0, 1, 5, 10, 15, 23, 33, 48)


def record_runs(folder: Path) -> list[Path]:
    """The random runs."""
    for seed in SEEDS:
        record(folder, seed)
    forwarded = [record_backends(folder, seed, segment_bytes=SEGMENT_BYTES) for seed in FORWARDED_SEEDS]
    return [*(folder / f"seed-{seed}" for seed in SEEDS), *forwarded, record_ranks(folder)]


def record_ranks(folder: Path) -> Path:
    """A run of three replicas, each three stages of three KV groups, in many segments."""
    with LogWriter(real_system(), folder, "ranks", segment_bytes=SEGMENT_BYTES) as writer:
        Simulation(7, writer=writer, check_every=0).run()
    return folder / "ranks"


def assert_same(index: Index, other: Index) -> None:
    """Tables are equal, but for the numbers of names and for gauges that repeat what held before."""
    for name, table in index.tables.items():
        if name == "gauges":
            continue
        for column in table.schema.columns:
            ours, theirs = table[column].tolist(), other.tables[name][column].tolist()
            if column in ("kind", "service_class", "reason", "text") and (name, column) != ("marks", "kind"):
                ours, theirs = [index.name(n) for n in ours], [other.name(n) for n in theirs]
            assert ours == theirs, (name, column)
    launches = list(zip(index.steps["replica"].tolist(), index.steps["launch_s"].tolist(), strict=True))
    for drain in range(len(index.drains)):
        ours_at, theirs_at = index.gauges_at(drain), other.gauges_at(drain)
        for replica, row in ours_at.items():
            # Behind a border between parts the latest plan, and with it the head, is not known until the next one,
            # which comes as soon as there is room for a step.
            is_unseen = theirs_at[replica]["head_cause"] == UNSEEN_CAUSE
            names = [name for name in row if name != "drain" and not (is_unseen and name.startswith("head_"))]
            assert [row[name] for name in names] == [theirs_at[replica][name] for name in names], drain
            if is_unseen:
                next_s = index.drains.row(drain)["next_s"]
                border = other.snapshot_before(next_s)
                assert border is not None
                core = index.header.core
                # Behind a long step there is no room for another one.
                assert row["in_flight"] >= (core.stages if core.run_ahead_ms else core.steps_in_flight)
                assert not [s for by, s in launches if by == replica and border.next_s <= s < next_s]


def refuse(*_: object) -> None:
    raise AssertionError("the whole run was read")
