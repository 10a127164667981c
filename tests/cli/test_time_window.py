"""`--from` and `--to`: parts of a run by time of day, or since its start."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

import pytest

from eventlm.cli.time_window import add_window_flags, nanoseconds, parse_window, window_in_words
from eventlm.errors import UsageError
from eventlm.events import End
from eventlm.types import TimeWindow
from tests.bus.traces import header, lines

S = 1_000_000_000
START = datetime(2026, 11, 23, 14, 0, 30, tzinfo=UTC)


def trace(folder: Path, start: datetime | None = START) -> str:
    unix_start_ns = 0 if start is None else int(start.timestamp()) * S
    path = folder / "trace.jsonl"
    events = [header(unix_start_ns=str(unix_start_ns)), End(s=1, ts=3 * 24 * 3600 * S)]
    path.write_bytes(b"".join(lines(events)))
    return str(path)


def window(path: str, *arguments: str) -> TimeWindow | None:
    parser = argparse.ArgumentParser()
    add_window_flags(parser)
    return parse_window(parser.parse_args(arguments), path)


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("90", 90 * S),
        ("1.5", 1_500_000_000),
        ("1.5s", 1_500_000_000),
        ("20ms", 20_000_000),
        ("2min", 120 * S),
        ("14:05", 270 * S),
        ("14:05:10", 280 * S),
        ("14:05:10.25", 280 * S + 250_000_000),
        ("14:00:30", 0),
        # The run began within that minute.
        ("14:00", 0),
        # Before the start of the run it is the next day's.
        ("13:59", 24 * 3600 * S - 90 * S),
        ("14:00:29", 24 * 3600 * S - S),
        ("2026-11-23T14:05", 270 * S),
        ("2026-11-23 14:05:10", 280 * S),
        ("2026-11-23T15:05:10+01:00", 280 * S),
        ("2026-11-25T14:00:30Z", 48 * 3600 * S),
        ("2026-11-22T14:00", 0),
    ],
)
def test_what_a_time_stands_for(tmp_path: Path, text: str, ns: int) -> None:
    assert window(trace(tmp_path), "--from", text) == TimeWindow(ns, None)


def test_the_end_is_the_first_such_time_after_the_beginning(tmp_path: Path) -> None:
    path = trace(tmp_path)
    assert window(path, "--from", "23:59", "--to", "0:01") == TimeWindow(35_910 * S, 36_030 * S)
    assert window(path, "--from", "14:05", "--to", "14:06") == TimeWindow(270 * S, 330 * S)
    assert window(path, "--to", "14:01") == TimeWindow(0, 30 * S)
    assert window(path, "--from", "60", "--to", "14:05") == TimeWindow(60 * S, 270 * S)


def test_without_the_flags_there_is_none(tmp_path: Path) -> None:
    assert window(str(tmp_path / "none")) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "noon"], "--from noon: not a time; give a time of day in UTC"),
        (["--to", ""], "--to : not a time"),
        (["--from", "-1"], "--from -1: not a time"),
        (["--from", "25:00"], "no such time of day"),
        (["--from", "2026-13-01T00:00"], "not a time"),
        (["--from", "90", "--to", "90"], "--to 90 is not after --from 90"),
        (["--to", "0"], "--to 0 is not after --from 0"),
        (["--to", "14:00"], "--to 14:00 is not after --from 0"),
        (["--from", "73h"], "--from 73h is after the run's last event; the run goes from 2026-11-23T14:00:30 to"),
        (["--from", "2026-11-27T14:00"], "after the run's last event"),
        (["--to", "2026-11-23T13:00"], "the run began later, at 2026-11-23T14:00:30"),
    ],
)
def test_mistakes(tmp_path: Path, arguments: list[str], message: str) -> None:
    path = trace(tmp_path)
    with pytest.raises(UsageError) as caught:
        window(path, *[f"{flag}={text}" for flag, text in zip(arguments[::2], arguments[1::2], strict=True)])
    assert message in str(caught.value)


def test_a_run_without_a_clock_has_no_times_of_day(tmp_path: Path) -> None:
    path = trace(tmp_path, None)
    assert window(path, "--from", "90") == TimeWindow(90 * S, None)
    with pytest.raises(UsageError, match="no times of day"):
        window(path, "--from", "14:05")


def test_in_words() -> None:
    start_ns = int(START.timestamp()) * S
    assert window_in_words(TimeWindow(270 * S, 330 * S), start_ns) == "2026-11-23T14:05:00 to 14:06:00 UTC"
    assert window_in_words(TimeWindow(0, None), start_ns) == "2026-11-23T14:00:30 UTC to the end"
    assert window_in_words(TimeWindow(0, 90 * S), 0) == "0 s to 90 s"


def test_what_lies_in_a_window() -> None:
    found = TimeWindow(10, 20)
    assert [found.has(ns) for ns in (9, 10, 19, 20)] == [False, True, True, False]
    assert [found.overlaps(*span) for span in ((0, 9), (0, 10), (12, 13), (19, 30), (20, 30), (0, 30))] == [
        False, True, True, True, False, True,
    ]  # fmt: skip
    assert TimeWindow(5, None).has(10**18)


@pytest.mark.parametrize(
    ("text", "ns"),
    [("1.5s", 1_500_000_000), ("0s", 0), ("20ms", 20_000_000), ("0.000000001s", 1), ("2min", 120 * 10**9), ("7ns", 7)],
)
def test_a_duration_is_exact(text: str, ns: int) -> None:
    assert nanoseconds(text, flag="--from") == ns


@pytest.mark.parametrize("text", ["", "5", "s", "1e3s", "-1s", "1 s", "nans"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError, match=r"--from .*such as 1.5s"):
        nanoseconds(text, flag="--from")
