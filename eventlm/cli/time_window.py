"""`--from` and `--to`: a part of a recorded run, by time of day or by seconds since its start.

One meaning in every command: the requests that arrived in the window, with all that became of them, and the steps that
overlap it.
"""

from __future__ import annotations

import argparse
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Literal

from eventlm.errors import UsageError
from eventlm.types import NANOSECONDS_PER_SECOND, TimeWindow

_UNITS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000, "min": 60_000_000_000, "h": 3_600_000_000_000}
_DURATION = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)(ns|us|ms|s|min|h)")
_SECONDS = re.compile(r"\d{1,12}(?:\.\d{1,9})?")
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2})(?:\.(\d{1,9}))?)?")
_DATED = re.compile(r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}.*")
_NANOSECONDS_PER_MINUTE = 60 * NANOSECONDS_PER_SECOND
_NANOSECONDS_PER_DAY = 86_400 * NANOSECONDS_PER_SECOND
_HELP = "a time of day in UTC (14:05, 14:05:10 or 2026-11-23T14:05), or since the start of the run (90, 1.5s, 2min)"

#: For the epilogs of commands with the flags.
WINDOW_HELP = """\
--from and --to cut a window out of the run: it has the requests that arrived
in it, with all that became of them, and the steps that overlap it. A time of
day is in UTC, as in the server's log, and is the first one after the start of
the run (for --to: after --from); the minute in which the run began is its
start. In a run of several days give the date too."""


def nanoseconds(text: str, *, flag: str) -> int:
    """The exact time of `1.5s`, `20ms` or `2min`; parts of a nanosecond are cut off. Raises UsageError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{flag} {text}: not a time; give a number with a unit ({', '.join(_UNITS)}), such as 1.5s")
    return int(Decimal(match[1]) * _UNITS[match[2]])


def add_window_flags(
    group: argparse._ActionsContainer, *, to_action: type[argparse.Action] | Literal["store"] = "store"
) -> None:
    """Add `--from` and `--to`. to_action: what `--to` does, where it has another meaning too."""
    group.add_argument("--from", dest="from_time", metavar="TIME", help=f"from here on: {_HELP}")
    group.add_argument("--to", dest="to_time", action=to_action, metavar="TIME", help="up to here, likewise")


def parse_window(arguments: argparse.Namespace, path: str) -> TimeWindow | None:
    """The window that the flags name in the trace at `path`; None if neither is given.

    Raises UsageError for what is no time, for a window that is empty, and for one that begins after the run's last
    event; and what LogReader raises.
    """
    if arguments.from_time is None and arguments.to_time is None:
        return None
    from eventlm.bus.log_reader import LogReader
    from eventlm.bus.run_list import last_event_ns

    with LogReader(path) as reader:
        header, last_file = reader.header, reader.segments[-1]
    unix_start_ns = int(header.unix_start_ns)
    from_ns = 0
    if arguments.from_time is not None:
        from_ns = _parse(arguments.from_time, "--from", unix_start_ns=unix_start_ns, after_ns=0)
    to_ns = None
    if arguments.to_time is not None:
        to_ns = _parse(arguments.to_time, "--to", unix_start_ns=unix_start_ns, after_ns=from_ns)
        if to_ns <= from_ns:
            raise UsageError(f"--to {arguments.to_time} is not after --from {arguments.from_time or 0}")
    last_ns = last_event_ns(last_file)
    if last_ns is not None and from_ns > last_ns:
        run = window_in_words(TimeWindow(0, last_ns), unix_start_ns)
        raise UsageError(f"--from {arguments.from_time} is after the run's last event; the run goes from {run}")
    return TimeWindow(from_ns, to_ns)


def _parse(text: str, flag: str, *, unix_start_ns: int, after_ns: int) -> int:
    """Nanoseconds of the run. A time of day without a date is the first one at or after `after_ns`, or that itself if
    it lies within the minute or second that was named.
    """
    text = text.strip()
    if _SECONDS.fullmatch(text):
        return int(Decimal(text) * NANOSECONDS_PER_SECOND)
    clock = _CLOCK.fullmatch(text)
    if clock is None and not _DATED.fullmatch(text):
        try:
            return nanoseconds(text, flag=flag)
        except UsageError:
            raise UsageError(f"{flag} {text}: not a time; give {_HELP}") from None
    if unix_start_ns <= 0:
        raise UsageError(f"{flag} {text}: the run has no times of day; give seconds since its start, such as 90")
    if clock is None:
        return _dated(text, flag, unix_start_ns)
    hours, minutes, seconds, fraction = (clock[1], clock[2], clock[3] or "0", clock[4] or "0")
    if int(hours) > 23 or int(minutes) > 59 or int(seconds) > 59:
        raise UsageError(f"{flag} {text}: no such time of day; hours are 0 to 23")
    of_day_ns = (int(hours) * 3600 + int(minutes) * 60 + int(seconds)) * NANOSECONDS_PER_SECOND
    of_day_ns += int(fraction.ljust(9, "0"))
    precision_ns = 1 if clock[4] else NANOSECONDS_PER_SECOND if clock[3] else _NANOSECONDS_PER_MINUTE
    if (unix_start_ns + after_ns - of_day_ns) % _NANOSECONDS_PER_DAY < precision_ns:
        return after_ns
    return after_ns + (of_day_ns - unix_start_ns - after_ns) % _NANOSECONDS_PER_DAY


def _dated(text: str, flag: str, unix_start_ns: int) -> int:
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text}: not a time: {error}") from error
    since_1970 = found.replace(tzinfo=found.tzinfo or UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    ns = since_1970 // timedelta(microseconds=1) * 1000 - unix_start_ns
    if ns < 0 and flag == "--to":
        raise UsageError(f"{flag} {text}: the run began later, at {_iso(unix_start_ns)}")
    return max(ns, 0)


def _iso(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns // NANOSECONDS_PER_SECOND, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def window_in_words(window: TimeWindow, unix_start_ns: int) -> str:
    """As `2026-11-23T14:05:00 to 14:06:00 UTC`, or in seconds for a run without times of day."""
    if unix_start_ns <= 0:
        ends = [f"{window.from_ns / NANOSECONDS_PER_SECOND:g} s"]
        ends += [f"{window.to_ns / NANOSECONDS_PER_SECOND:g} s" if window.to_ns is not None else "the end"]
        return " to ".join(ends)
    start = _iso(unix_start_ns + window.from_ns)
    if window.to_ns is None:
        return f"{start} UTC to the end"
    end = _iso(unix_start_ns + window.to_ns)
    return f"{start} to {end.removeprefix(start[:11])} UTC"
