"""Lines of a log between two events, and none beyond: what follows may be damaged."""

from __future__ import annotations

from collections.abc import Iterator

from eventlm.bus.log_reader import LogLine, LogReader


def lines_between(reader: LogReader, first_s: int, last_s: int) -> Iterator[LogLine]:
    """The lines of the events from `first_s` to `last_s`."""
    if first_s > last_s:
        return
    for line in reader.lines_from(max(first_s, reader.header.s)):
        if line.s > last_s:
            return
        yield line
        if line.s == last_s:
            return
