from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader, TornTail, read_history
from eventlm.bus.log_writer import LogWriter
from eventlm.errors import TornTraceError, TraceCorruptError, TraceVersionError, UsageError
from eventlm.events import Event, Header
from eventlm.events.codec import chain, close_line, encode_body
from eventlm.events.markers import BEHAVIOUR_VERSION, FORMAT_VERSION, SCHEMA_VERSION
from eventlm.system.system import real_system
from tests.bus import traces

HOLD_OPEN = """
import sys
from eventlm.bus.log_writer import LogWriter
from eventlm.system.system import real_system
from eventlm.events.codec import encode_body
from eventlm.system.system import real_system
from tests.bus.traces import events
writer = LogWriter(real_system(), sys.argv[1], "run")
for event in events(10, end=False):
    writer.append(encode_body(event))
writer.flush()
print("written", flush=True)
sys.stdin.read()
"""


def test_a_fold_sees_every_event_and_reports_progress(tmp_path: Path) -> None:
    made = traces.events(5000)
    traces.write(tmp_path / "t", made)
    seen: list[Event] = []
    told: list[tuple[int, int]] = []
    with LogReader(tmp_path / "t") as reader:
        reader.fold(seen.append, on_progress=lambda done, total: told.append((done, total)))
        assert reader.clean_end
    assert seen == made
    num_bytes = (tmp_path / "t").stat().st_size
    assert told[-1] == (num_bytes, num_bytes)
    assert len(told) > 1
    assert all(0 < done < total == num_bytes for done, total in told[:-1])


@pytest.mark.parametrize("kind", [KeyError, IndexError, ValueError, ZeroDivisionError])
def test_an_event_that_a_fold_cannot_take_is_damage_at_its_line(tmp_path: Path, kind: type[Exception]) -> None:
    def see(event: Event) -> None:
        if event.s == 7:
            raise kind("seven")

    traces.write(tmp_path / "t", traces.events(20))
    with (
        LogReader(tmp_path / "t") as reader,
        pytest.raises(TraceCorruptError, match=rf"damaged at line 8, byte \d+: it contradicts.*{kind.__name__}"),
    ):
        reader.fold(see)


def test_lines_come_with_number_offset_tag_seq_body_and_event(tmp_path: Path) -> None:
    made = traces.events(300, rows=40)
    closed = traces.write(tmp_path / "t", made)
    offset = 0
    with LogReader(tmp_path / "t") as reader:
        assert reader.header == made[0]
        for number, line in enumerate(reader, start=1):
            event = made[number - 1]
            assert (line.number, line.byte_offset, line.s) == (number, offset, event.s)
            assert line.tag == event.__struct_config__.tag
            assert line.body == encode_body(event)
            assert line.event() == event
            offset += len(closed[number - 1])
            assert reader.position == offset
        assert reader.num_lines == 300
        assert reader.position == reader.size_bytes == offset
        assert reader.clean_end
        assert reader.torn is None
        assert reader.warnings() == []


def test_a_trace_can_be_read_again(tmp_path: Path) -> None:
    traces.write(tmp_path / "t", traces.events(20))
    with LogReader(tmp_path / "t") as reader:
        next(iter(reader))
        assert list(reader) == list(reader)


def test_a_trace_without_end_has_no_clean_end(tmp_path: Path) -> None:
    traces.write(tmp_path / "t", traces.events(20, end=False))
    with LogReader(tmp_path / "t", strict=True) as reader:
        assert len(list(reader)) == 20
        assert not reader.clean_end
        assert reader.torn is None
        assert reader.warnings() == [
            f"{tmp_path / 't'} has no clean end: its engine was killed or replaced after event 19"
        ]


def test_a_later_segment_goes_on_from_the_hash_in_its_header(tmp_path: Path) -> None:
    first = traces.lines(traces.events(5, end=False))
    h = first[-1][-19:-3].decode()
    rest = [traces.header(s=5, previous_h=h), *traces.events(9)[6:]]
    (tmp_path / "t").write_bytes(b"".join(traces.lines(rest, previous_h=h)))
    with LogReader(tmp_path / "t") as reader:
        assert [line.s for line in reader] == [5, 6, 7, 8]


@pytest.mark.parametrize(("field", "value"), [("format", 2), ("schema", 99), ("behaviour", 0), ("format", -1)])
def test_another_version_is_refused_with_both_versions(tmp_path: Path, field: str, value: int) -> None:
    traces.write(tmp_path / "t", [traces.header(**{field: value, "code_version": "7.8.9"})])
    with pytest.raises(TraceVersionError) as caught:
        LogReader(tmp_path / "t")
    assert f"{field} {value}" in str(caught.value)
    assert f"{field} {getattr(traces.header(), field)}" in str(caught.value)
    assert "written by eventlm 7.8.9" in str(caught.value)
    assert "read it with the version that wrote it" in str(caught.value)
    assert caught.value.exit_code == 13


def test_a_newer_header_with_fields_unknown_today_is_a_version_error(tmp_path: Path) -> None:
    body = b'{"t":"header","s":0,"format":1,"schema":99,"behaviour":1,"novel":{"x":[1]},"code_version":"2.0"'
    (tmp_path / "t").write_bytes(close_line(body, chain("", body)))
    with pytest.raises(TraceVersionError, match="schema 99"):
        LogReader(tmp_path / "t")


def test_versions_stand_in_the_file_even_when_they_are_the_defaults() -> None:
    body = encode_body(traces.header())
    versions = f'"format":{FORMAT_VERSION},"schema":{SCHEMA_VERSION},"behaviour":{BEHAVIOUR_VERSION},'
    assert versions.encode() in body


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "it has no complete header"),
        (b'{"t":"header"', "it has no complete header"),
        (b'{"t":"header","s":0}\n', "its first line is not the header of a trace"),
        (b'{"t":"Header","s":0,"h":"0123456789abcdef"}\n', "its first line is not the header of a trace"),
        (traces.lines(traces.events(3))[1], "its first line is not the header of a trace"),
        (b'{"t":"header",]' + b',"h":"0123456789abcdef"}\n', "its header cannot be read"),
        (b'{"t":"header","s":0' + b',"h":"0123456789abcdef"}\n', "the hash of its header does not match"),
    ],
)
def test_what_does_not_begin_with_a_header_is_refused(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(TraceCorruptError, match=f"line 1, byte 0: {what}"):
        LogReader(tmp_path / "t")


@pytest.mark.parametrize("content", [b"\n", b"hello", b"hello\nworld\n", b'{"a":1}\n', b"\x7fELF\x00" * 9])
def test_what_is_no_trace_at_all_is_a_usage_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(UsageError, match="t is not a trace: its first line is no header"):
        LogReader(tmp_path / "t")


def test_what_is_not_a_file_is_a_usage_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(UsageError, match="cannot read the trace"):
            LogReader(path)


def _rest_is_refused(path: Path, made: list[bytes], body: bytes, what: str) -> None:
    """A line with this body, hashed rightly, must be refused behind `made`."""
    previous_h = made[-1][-19:-3].decode()
    path.write_bytes(b"".join(made) + close_line(body, chain(previous_h, body)))
    index = f"line {len(made) + 1}, byte {sum(map(len, made))}: "
    with LogReader(path) as reader, pytest.raises(TraceCorruptError, match=index + what):
        [line.event() for line in reader]


def test_lines_whose_hash_is_right_but_not_their_content(tmp_path: Path) -> None:
    made = traces.lines(traces.events(5, end=False))
    refused = [
        (b'{"t":"resume","s":7', "event 7 stands where event 5 belongs"),
        (b'{"t":"resume","s":4', "event 4 stands where event 5 belongs"),
        (b'{"s":5,"t":"resume"', "it does not begin as an event does"),
        (b'{"t":"resume","s":5,"c":[', "it is not an event"),
        (b'{"t":"unheard_of","s":5', "it is not an event"),
        (b'{"t":"resume","s":5,"more":1', "it is not an event"),
        (b'{"t":"cancel","s":5,"request":"x"', "it is not an event"),
        (b'{"t":"cancel","s":5,"request":1,"reason":"\xff"', "it is not an event"),
    ]
    for body, what in refused:
        _rest_is_refused(tmp_path / "t", made, body, what)


def test_nothing_may_follow_the_end(tmp_path: Path) -> None:
    made = traces.lines(traces.events(5))
    _rest_is_refused(tmp_path / "t", made, b'{"t":"resume","s":5', "it follows the end record")
    (tmp_path / "t").write_bytes(b"".join(made) + b'{"t":"re')
    with pytest.raises(TraceCorruptError, match=r"line 6, byte .*: 8 bytes follow the end record"):
        list(LogReader(tmp_path / "t"))


def test_a_tail_torn_at_any_byte_leaves_the_lines_before_it(tmp_path: Path) -> None:
    made = traces.events(6, end=False)
    closed = traces.write(tmp_path / "t", made)
    whole_bytes = sum(map(len, closed[:-1]))
    for num_bytes in range(len(closed[-1]) - 1, 0, -1):
        with open(tmp_path / "t", "r+b") as file:
            file.truncate(whole_bytes + num_bytes)
        with LogReader(tmp_path / "t") as reader:
            assert [line.event() for line in reader] == made[:-1]
            assert reader.torn == TornTail(6, whole_bytes, num_bytes)
            assert not reader.clean_end
            assert f"torn: {num_bytes} bytes at line 6, byte {whole_bytes}" in reader.warnings()[0]
        valid = []
        with pytest.raises(TornTraceError, match=f"line 6, byte {whole_bytes}: {num_bytes} bytes") as caught:
            valid.extend(LogReader(tmp_path / "t", strict=True))
        assert caught.value.exit_code == 4


def test_a_torn_tail_is_as_long_as_it_is_even_without_any_newline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces.write(tmp_path / "t", traces.events(6, end=False))
    with open(tmp_path / "t", "ab") as file:
        file.write(b"\0" * 10_000)
    with LogReader(tmp_path / "t") as reader:
        list(reader)
        assert reader.torn is not None
        assert reader.torn.num_bytes == 10_000
    monkeypatch.setattr("eventlm.bus.segment_reader.MAX_LINE_BYTES", 4096)
    with pytest.raises(TraceCorruptError, match=r"line 7, .* the line is longer than 4096 bytes"):
        list(LogReader(tmp_path / "t"))


def test_lines_from_finds_every_event_and_checks_from_there(tmp_path: Path) -> None:
    made = traces.events(3000, rows=30)
    closed = traces.write(tmp_path / "t", made)
    assert sum(map(len, closed)) > 4 * 64 * 1024
    with LogReader(tmp_path / "t") as reader:
        whole = list(reader)
        for s in [0, 1, 2, *range(3, 2999, 97), 2998, 2999]:
            assert next(reader.lines_from(s)) == whole[s]
        assert list(reader.lines_from(1234)) == whole[1234:]
        assert reader.clean_end
        assert list(reader.lines_from(3000)) == list(reader.lines_from(9999)) == []


def test_lines_from_refuses_damage_after_its_start_and_survives_damage_where_it_searches(
    tmp_path: Path,
) -> None:
    made = traces.events(3000, rows=30)
    closed = traces.lines(made)
    closed[2000] = closed[2000].replace(b'"ts":', b'"tt":')
    (tmp_path / "t").write_bytes(b"".join(closed))
    with LogReader(tmp_path / "t") as reader, pytest.raises(TraceCorruptError, match="line 2001,"):
        list(reader.lines_from(1500))
    (tmp_path / "t").write_bytes(b"".join(traces.lines(made)).replace(b'"t":', b'"T":')[:-10])
    with pytest.raises(TraceCorruptError):
        LogReader(tmp_path / "t")
    garbage = [*traces.lines(made)[:1], *[b"x" * 200 + b"\n"] * 3000]
    (tmp_path / "t").write_bytes(b"".join(garbage))
    with LogReader(tmp_path / "t") as reader, pytest.raises(TraceCorruptError, match="line 2,"):
        list(reader.lines_from(1500))


def test_history_is_inclusive_and_ends_where_the_file_ends(tmp_path: Path) -> None:
    made = traces.events(40)
    traces.write(tmp_path / "t", made)
    assert list(read_history(tmp_path / "t", 0, 3)) == made[:4]
    assert list(read_history(tmp_path / "t", 7, 7)) == [made[7]]
    assert list(read_history(tmp_path / "t", 38, 100)) == made[38:]


def test_a_trace_whose_writer_lives_in_this_process(tmp_path: Path) -> None:
    made = traces.events(5)
    with LogWriter(real_system(), tmp_path, "run") as writer:
        with pytest.raises(UsageError, match="the run has only begun"):
            LogReader(writer.path)
        for event in made:
            writer.append(encode_body(event))
        writer.flush()
        with LogReader(writer.path) as reader:
            assert reader.still_being_written
    with LogReader(writer.path) as reader:
        assert not reader.still_being_written


def test_a_trace_whose_writer_lives_in_another_process(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_OPEN, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    path = tmp_path / "latest" / "trace.jsonl"
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        with open(path, "ab") as file:
            file.write(b'{"t":"half a li')
        with LogReader(path, strict=True) as reader:
            assert reader.still_being_written
            assert [line.s for line in reader] == list(range(10))
            assert reader.torn is None
            assert not reader.clean_end
            assert reader.warnings() == [f"{path} is still being written: its 10 complete lines were used"]
    finally:
        process.communicate("")
    with LogReader(path) as reader:
        assert not reader.still_being_written
        list(reader)
        assert reader.torn is not None
        assert reader.torn.num_bytes == 15


def test_reading_stops_at_the_size_seen_at_opening(tmp_path: Path) -> None:
    made = traces.events(10)
    closed = traces.lines(made)
    (tmp_path / "t").write_bytes(b"".join(closed[:4]))
    with LogReader(tmp_path / "t") as reader:
        with open(tmp_path / "t", "ab") as file:
            file.write(b"".join(closed[4:]))
        assert [line.s for line in reader] == [0, 1, 2, 3]


def test_the_header_is_a_header(tmp_path: Path) -> None:
    traces.write(tmp_path / "t", traces.events(3))
    with LogReader(tmp_path / "t") as reader:
        assert isinstance(reader.header, Header)
        assert reader.header.core.num_blocks == 1024
