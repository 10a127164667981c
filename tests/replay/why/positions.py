"""A log with snapshots of its core, as a debugger keeps them, to ask at any position."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from eventlm.bus.log_reader import LogReader
from eventlm.core.core import Core
from eventlm.core.state.sequence import State
from eventlm.events import Fact
from eventlm.replay.rebuild import rebuild
from eventlm.replay.verify.verifier import Verifier
from eventlm.replay.why.examiner import Examiner
from eventlm.types import SequenceId


class Drain(NamedTuple):
    """A drain by the position of its last event, with all that lives after it."""

    last_s: int
    ts: int
    live: list[SequenceId]


class Positions(NamedTuple):
    """A log, its drains, and somebody who answers."""

    reader: LogReader
    drains: list[Drain]
    examiner: Examiner


@contextmanager
def positions(path: Path, *, every: int) -> Iterator[Positions]:
    """A snapshot is kept after every so many drains."""
    with LogReader(path) as reader, LogReader(path) as second:
        rebuilt = rebuild(reader.header)
        verifier = Verifier(rebuilt, reader.header)
        drains: list[Drain] = []
        snapshots: dict[int, bytes] = {}
        for line in reader:
            verifier.feed(line)
            event = line.event()
            core = verifier.core
            if not isinstance(event, Fact) or not event.p:
                continue
            sequences = [each for request in core.state.requests.values() for each in request.sequences]
            living = [each.id for each in sequences if each.state is not State.FINISHED]
            drains.append(Drain(core.next_seq - 1, event.ts, living))
            if len(drains) % every == 0:
                snapshots[core.next_seq] = core.snapshot()

        def restore(s: int) -> Core:
            known = sorted(snapshots)
            place = bisect_right(known, s)
            return rebuilt.restored_core(snapshots[known[place - 1]]) if place else rebuilt.new_core()

        yield Positions(reader, drains, Examiner(second, rebuilt, restore))
