"""Server-sent events, cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventlm.client.sse import SseDecoder

CASES = {
    "a space or none": (b"data: a\n\ndata:b\n\n", [b"a", b"b"]),
    "one space only": (b"data:  a\n\n", [b" a"]),
    "crlf": (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
    "cr": (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
    "comments": (b": ping\n\n:\ndata: a\n: in between\n\n", [b"a"]),
    "several lines": (b"data: a\ndata: b\ndata:\n\n", [b"a\nb\n"]),
    "other fields": (b"event: message\nid: 7\nretry: 10\ndata: a\n\n", [b"a"]),
    "a field without a value": (b"data\n\n", [b""]),
    "no data": (b"event: ping\n\n\n\n", []),
    "no blank line at the end": (b"data: a\n\ndata: [DONE]", [b"a", b"[DONE]"]),
    "done without a space": (b"data:[DONE]\n\n", [b"[DONE]"]),
    "byte order mark": (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
    "errors as llama.cpp had them": (b'error: {"message":"no"}\n\n', [b'{"error": {"message":"no"}}']),
    "similar names": (b"database: a\ndata: b\n\n", [b"b"]),
    "nothing": (b"", []),
}


@pytest.mark.parametrize("name", CASES)
def test_decodes(name: str) -> None:
    stream, expected = CASES[name]
    decoder = SseDecoder()
    assert decoder.feed(stream) + decoder.end() == expected


@pytest.mark.parametrize("name", CASES)
def test_decodes_byte_by_byte(name: str) -> None:
    stream, expected = CASES[name]
    decoder = SseDecoder()
    events = [event for byte in stream for event in decoder.feed(bytes([byte]))]
    assert events + decoder.end() == expected


_LINES = st.sampled_from([b"data: x", b"data:", b"data:y y", b": c", b"", b"", b"event: e"])
_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(st.lists(st.tuples(_LINES, _ENDS), max_size=12), st.lists(st.integers(0, 60), max_size=6))
def test_cuts_change_nothing(lines: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    stream = b"".join(line + end for line, end in lines)
    whole = SseDecoder()
    expected = whole.feed(stream) + whole.end()
    decoder, events, start = SseDecoder(), [], 0
    for cut in [*sorted(cuts), len(stream)]:
        events += decoder.feed(stream[start:cut])
        start = max(start, min(cut, len(stream)))
    assert events + decoder.end() == expected


def test_an_event_is_there_when_its_blank_line_is() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: a\n") == []
    assert decoder.feed(b"\n") == [b"a"]
    assert decoder.feed(b"data: b\r\n\r") == [b"b"]
    assert decoder.feed(b"\ndata: c\n\n") == [b"c"]


def test_bytes_of_an_event_that_has_not_ended_are_counted() -> None:
    decoder = SseDecoder()
    counts = []
    for data in (b"data: 12", b"34", b"\ndata: 5", b"\n\n: a comment\n\n", b"data"):
        decoder.feed(data)
        counts.append(decoder.num_pending)
    assert counts == [8, 10, 18, 0, 4]
