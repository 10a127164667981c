from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from eventlm.bus.log_reader import TornTail
from eventlm.bus.log_writer import LogWriter
from eventlm.bus.trace_info import check, info
from eventlm.errors import TornTraceError, TraceCorruptError
from eventlm.events import Admitted, Arrived, Emitted, End, Finished, Launched, Preempted, Rejected, UserMark
from eventlm.events.codec import chain, close_line, encode_body
from eventlm.scheduling_params import SchedulingParams
from eventlm.system.system import real_system
from tests.bus import traces


def test_info_counts_the_run(tmp_path: Path) -> None:
    step = {"replica": 0, "epoch": 1, "num_tokens": 7, "predicted_ns": 5}
    made = [
        traces.header(),
        Arrived(s=1, ts=10, p=1, prompt_tokens=40, max_tokens=8, scheduling=SchedulingParams(model="m")),
        Arrived(s=2, ts=10, p=1, prompt_tokens=2, max_tokens=8, scheduling=SchedulingParams(model="m")),
        Admitted(s=3, ts=10, c=1, request=1),
        Rejected(s=4, ts=10, c=2, request=2, reason="queue_full"),
        Launched(s=5, ts=10, c=2, step=0, **step),
        Preempted(s=6, ts=10, c=2, request=1, index=0, replica=0, reason="memory"),
        Launched(s=7, ts=10, c=2, step=1, **step),
        Emitted(s=8, ts=900, replica=0, step=0, num_tokens=3),
        Emitted(s=9, ts=900, replica=0, step=1, num_tokens=4),
        Finished(s=10, ts=900, request=1, index=1, reason="length", position=3),
        Finished(s=11, ts=900, request=1, index=0, reason="eos", position=3),
        UserMark(s=12, ts=950, text="x"),
        End(s=13, ts=1000),
    ]
    traces.write(tmp_path / "t", made)
    found = info(tmp_path / "t")
    assert found.header == made[0]
    assert found.check == check(tmp_path / "t")
    assert found.check.end_state == "end"
    assert found.check.num_events == 14
    assert found.duration_ns == 1000
    assert (found.num_facts, found.num_decisions, found.num_markers) == (2, 9, 3)
    assert list(found.events_by_tag.items()) == [
        ("admit", 1),
        ("arrive", 2),
        ("emit", 2),
        ("end", 1),
        ("finish", 2),
        ("header", 1),
        ("launch", 2),
        ("mark", 1),
        ("preempt", 1),
        ("reject", 1),
    ]
    assert (found.num_requests, found.num_rejected, found.num_preemptions, found.num_steps) == (2, 1, 1, 2)
    assert (found.num_prompt_tokens, found.num_output_tokens) == (42, 7)
    assert list(found.finish_reasons.items()) == [("eos", 1), ("length", 1)]
    assert found.reject_reasons == {"queue_full": 1}
    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found


def test_check_names_the_end_state(tmp_path: Path) -> None:
    path = tmp_path / "t"
    closed = traces.write(path, traces.events(20, end=False))
    num_bytes = sum(map(len, closed))
    found = check(path)
    assert (found.num_events, found.num_bytes, found.end_state) == (20, num_bytes, "no_end")
    assert "no clean end" in found.warnings[0]
    with open(path, "ab") as file:
        file.write(b'{"t"')
    found = check(path)
    assert (found.num_events, found.num_bytes, found.end_state) == (20, num_bytes, "torn")
    assert found.torn == TornTail(21, num_bytes, 4)
    with pytest.raises(TornTraceError):
        check(path, strict=True)
    with LogWriter(real_system(), tmp_path, "run") as writer:
        for event in traces.events(20):
            writer.append(encode_body(event))
        writer.flush()
        assert check(writer.path).end_state == info(writer.path).check.end_state == "still_being_written"
    assert check(writer.path).end_state == "end"
    assert check(writer.path).warnings == []


def test_check_decodes_every_event(tmp_path: Path) -> None:
    closed = traces.lines(traces.events(3, end=False))
    body = b'{"t":"cancel","s":3,"request":"a name"'
    (tmp_path / "t").write_bytes(b"".join(closed) + close_line(body, chain(closed[-1][-19:-3].decode(), body)))
    for read in (check, info):
        with pytest.raises(TraceCorruptError, match=r"line 4, .*it is not an event"):
            read(tmp_path / "t")


def test_progress_grows_to_the_size_of_the_file(tmp_path: Path) -> None:
    closed = traces.write(tmp_path / "t", traces.events(9000))
    size_bytes = sum(map(len, closed))
    calls: list[tuple[int, int]] = []
    check(tmp_path / "t", on_progress=lambda position, size: calls.append((position, size)))
    positions = [position for position, _ in calls]
    assert len(positions) == 3
    assert positions == sorted(positions)
    assert {size for _, size in calls} == {size_bytes}
    assert positions[-1] == size_bytes
