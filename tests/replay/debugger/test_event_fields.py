"""Fields read from lines are those of the whole events."""

from __future__ import annotations

from pathlib import Path

from eventlm.bus.log_reader import LogReader
from eventlm.replay.debugger.event_fields import NAMES, FieldReader, has_field
from tests.replay.debugger.straight import fields_of


def test_every_field_of_every_event(all_runs: list[Path]) -> None:
    read = FieldReader(tuple(sorted(NAMES))).read
    tags = set()
    for path in all_runs[:8]:
        with LogReader(path) as reader:
            for line in reader:
                tags.add(line.tag)
                assert read(line) == fields_of(line.event()), line.body
    assert len(tags) > 15


def test_only_the_wanted_names_are_read(all_runs: list[Path]) -> None:
    read = FieldReader(("step", "tokens")).read
    with LogReader(all_runs[0]) as reader:
        launch = next(line for line in reader if line.tag == "launch")
    whole = fields_of(launch.event())
    names = ("event", "s", "time", "cause", "step", "tokens")
    assert read(launch) == {name: whole[name] for name in names}


def test_which_events_have_a_field() -> None:
    assert has_field("launch", "tokens")
    assert has_field("arrive", "request")
    assert has_field("header", "time")
    assert not has_field("header", "request")
    assert not has_field("pause", "step")
