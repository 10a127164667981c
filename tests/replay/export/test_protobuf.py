"""The wire format, against Google's implementation."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

from eventlm.replay.export.protobuf import bytes_field, fixed64_field, text_field, varint, varint_field


@pytest.mark.parametrize(
    ("value", "encoded"),
    [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02"), (1 << 64, "00"), ((1 << 64) - 1, "ff" * 9 + "01")],
)
def test_varints(value: int, encoded: str) -> None:
    assert varint(value).hex() == encoded


@settings(max_examples=50)
@example(uint=0, signed=-1, flows=[], text="é" * 200)
@given(
    uint=st.integers(0, (1 << 64) - 1),
    signed=st.integers(-(1 << 63), (1 << 63) - 1),
    flows=st.lists(st.integers(0, (1 << 64) - 1), max_size=3),
    # Of one to four bytes each; a table of all characters takes seconds to build.
    text=st.text("\0aé漢🙂", max_size=20),
)
def test_a_message_comes_out_as_it_went_in(uint: int, signed: int, flows: list[int], text: str) -> None:
    event = varint_field(30)(signed) + text_field(23)(text) + b"".join(map(fixed64_field(47), flows))
    packet = TracePacket()
    packet.ParseFromString(varint_field(8)(uint) + bytes_field(11)(event))
    assert packet.timestamp == uint
    assert packet.track_event.counter_value == signed
    assert packet.track_event.name == text
    assert list(packet.track_event.flow_ids) == flows


def test_text_that_is_not_unicode() -> None:
    event = TrackEvent()
    event.ParseFromString(text_field(23)("a\ud800b"))
    assert event.name == "a?b"
