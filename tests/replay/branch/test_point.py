"""Where a run can be left: after any whole drain, by event or time; elsewhere one line says where."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.core.state.validate import validate
from eventlm.errors import ExitCode, UsageError
from eventlm.events import Decision, Fact
from eventlm.events.codec import chain
from eventlm.replay.branch.point import BranchPlace, BranchPoint, find_point
from eventlm.replay.rebuild import rebuild
from eventlm.replay.verify.divergence_error import DivergenceError
from tests.replay.branch_runs import SEGMENT_BYTES, drain_ends, record_random, record_with_gap, without_first_half
from tests.replay.golden import FOLDER
from tests.replay.traces import another_block, read_objects, tampered

GOLDEN = FOLDER / "edf_tight.jsonl"
OBJECTS = read_objects(GOLDEN)


def last_of_drains() -> list[int]:
    """Positions of the last event of each drain, without markers."""
    with LogReader(GOLDEN) as log:
        events = [line.event() for line in log]
    ends = []
    for index, event in enumerate(events):
        follower = events[index + 1] if index + 1 < len(events) else None
        if isinstance(event, Fact | Decision) and not isinstance(follower, Decision):
            fact = next(each for each in reversed(events[: index + 1]) if isinstance(each, Fact))
            if fact.p:
                ends.append(event.s)
    return ends


ENDS = last_of_drains()


def test_an_event_of_the_marked_fact_names_the_end_of_its_drain() -> None:
    chosen = ENDS[len(ENDS) // 2]
    marked = max(item["s"] for item in OBJECTS[: chosen + 1] if item.get("p"))
    assert marked < chosen
    points = [find_point(GOLDEN, BranchPlace(event=s)) for s in range(marked, chosen + 1)]
    assert {point.s for point in points} == {chosen}
    assert points[0].now_ns == OBJECTS[chosen]["ts"]
    h = ""
    for line in GOLDEN.read_bytes().splitlines()[: chosen + 1]:
        h = chain(h, line[: line.rindex(b',"h":"')])
    assert points[0].h == h


def test_the_core_there_is_whole_and_goes_on_as_the_run_did() -> None:
    with LogReader(GOLDEN) as log:
        rebuilt = rebuild(log.header)
        core = rebuilt.restored_core(find_point(GOLDEN, BranchPlace(event=ENDS[20])).snapshot)
        validate(core.state)
        expected: list[Decision] = []
        for line in log.lines_from(core.next_seq):
            event = line.event()
            if isinstance(event, Decision):
                assert event == expected.pop(0)
            else:
                assert not expected
                expected = core.apply(event)  # type: ignore[arg-type]
    assert BranchPoint.of(core).s == OBJECTS[-1]["s"]


def test_a_time_is_the_first_drain_at_or_after_it() -> None:
    index = len(ENDS) // 2
    at_ns, before_ns = OBJECTS[ENDS[index]]["ts"], OBJECTS[ENDS[index - 1]]["ts"]
    for time_ns in (at_ns, before_ns + 1):
        assert find_point(GOLDEN, BranchPlace(time_ns=time_ns)).s == ENDS[index]


def test_inside_a_drain_is_refused_and_its_end_is_named() -> None:
    open_fact = next(item["s"] for item in OBJECTS if item["t"] == "arrive" and not item.get("p"))
    end = next(s for s in ENDS if s > open_fact)
    with pytest.raises(UsageError, match=rf"event {open_fact} is inside a drain.* ends with event {end}: branch there"):
        find_point(GOLDEN, BranchPlace(event=open_fact))


@pytest.mark.parametrize("place", [BranchPlace(event=99_999), BranchPlace(time_ns=10**15)])
def test_beyond_the_end_is_refused(place: BranchPlace) -> None:
    with pytest.raises(UsageError, match=r"is beyond the end of the last drain before event \d+"):
        find_point(GOLDEN, place)


def test_a_run_that_comes_out_otherwise_cannot_be_left_behind_that(tmp_path: Path) -> None:
    at: list[int] = []
    path = tampered(GOLDEN, tmp_path / "trace.jsonl", lambda objects: at.append(another_block(objects)))
    assert find_point(path, BranchPlace(event=at[0] - 3 if OBJECTS[at[0] - 3].get("p") else 0)).s < at[0]
    with pytest.raises(DivergenceError, match=rf"at event {at[0]} .*; there is no state to branch from") as found:
        find_point(path, BranchPlace(event=ENDS[-1]))
    assert found.value.exit_code == ExitCode.DIFFERENT


def test_a_log_that_begins_in_the_middle_has_points_from_there_on(tmp_path: Path) -> None:
    path = without_first_half(record_random(tmp_path, 5, segment_bytes=SEGMENT_BYTES))
    with LogReader(path) as log:
        first_s = log.header.s
    assert first_s > 0
    point = find_point(path, BranchPlace())
    assert point.s == first_s + 1
    assert find_point(path, BranchPlace(event=first_s)) == point
    with pytest.raises(UsageError, match="begins with event"):
        find_point(path, BranchPlace(event=first_s - 1))


def test_segments_before_the_place_need_not_be_read(tmp_path: Path) -> None:
    run = record_random(tmp_path, 5, segment_bytes=SEGMENT_BYTES)
    places = [BranchPlace(event=s) for s in drain_ends(run)[3::9]]
    places += [BranchPlace(time_ns=find_point(run, place).now_ns) for place in places]
    whole = [find_point(run, place) for place in places]
    for place, point in zip(places, whole, strict=True):
        assert point.s >= place.event
        assert point.h
    assert [point.s for point in whole[: len(whole) // 2]] == [point.s for point in whole[len(whole) // 2 :]]
    first = min(run.glob("trace-*.jsonl"))
    first.write_bytes(first.read_bytes().replace(b'"t":"launch"', b'"t":"launcj"'))
    assert [find_point(run, place) for place in places[-2:]] == whole[-2:]


def test_a_place_in_a_gap_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record_with_gap(tmp_path, monkeypatch)
    with LogReader(path) as log:
        for _ in log:
            pass
        gap = log.gaps[0]
    with pytest.raises(UsageError, match=f"lies in a gap: events {gap.first} to {gap.last} are missing"):
        find_point(path, BranchPlace(event=gap.first))
    assert find_point(path, BranchPlace(event=gap.last + 1)).s > gap.last
