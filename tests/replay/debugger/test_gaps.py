"""Which events there are, and how far one is from another."""

from __future__ import annotations

from pathlib import Path

from eventlm.bus.log_reader import LogReader
from eventlm.replay.debugger.gaps import EventNumbers
from eventlm.replay.index.open import open_index


def test_every_distance(all_runs: list[Path], lossy_runs: list[Path]) -> None:
    num_gaps = 0
    for path in [*all_runs[:7], *lossy_runs]:
        with LogReader(path) as reader:
            events = [line.s for line in reader]
        numbers = EventNumbers(open_index(path))
        num_gaps += len(numbers.gaps)
        assert (numbers.first_s, numbers.last_s) == (events[0], events[-1])
        for at in range(0, len(events), 1 + len(events) // 20):
            assert numbers.num_until(events[at]) == at + 1
            for count in (-len(events), -at - 1, -at, -3, -1, 0, 1, 5, len(events) - 1 - at, len(events) - at):
                expected = events[at + count] if 0 <= at + count < len(events) else None
                assert numbers.moved(events[at], count) == expected
        missing = set(range(events[0], events[-1] + 1)) - set(events)
        assert {s for first, last in numbers.gaps for s in range(first, last + 1)} == missing
        for s in [*sorted(missing)[:3], events[1]]:
            assert (numbers.gap_with(s) is not None) == (s in missing)
    assert num_gaps
