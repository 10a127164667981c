"""Traces of real load, right and wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.bench.trace_arrivals import Arrival, read_arrivals
from eventlm.errors import UsageError

EXPECTED = [Arrival(0.0, 10, 5), Arrival(0.5, 20, 6), Arrival(2.0, 30, 7)]


def read(tmp_path: Path, text: str) -> list[Arrival]:
    path = tmp_path / "trace"
    path.write_text(text)
    return read_arrivals(str(path))


def test_csv_of_any_order_and_origin(tmp_path: Path) -> None:
    text = "output_tokens, arrival_s,prompt_tokens,note\n6,100.5,20,x\n5,100,10,y\n7,102,30,\n"
    assert read(tmp_path, text) == EXPECTED


def test_csv_with_a_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    text = "\ufeffarrival_s,prompt_tokens,output_tokens\r\n0,10,5\r\n0.5,20,6\r\n2,30,7\r\n"
    assert read(tmp_path, text) == EXPECTED


def test_json_lines(tmp_path: Path) -> None:
    lines = [
        f'{{"arrival_s":{7 + a.arrival_s},"prompt_tokens":{a.prompt_tokens},"output_tokens":{a.output_tokens}}}'
        for a in EXPECTED
    ]
    assert read(tmp_path, "\n\n".join(lines)) == EXPECTED


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no request"),
        ("arrival_s,prompt_tokens,output_tokens\n", "there is no request"),
        ("a,b\n1,2\n", "the columns are a, b, but needed are arrival_s, prompt_tokens, output_tokens"),
        ("arrival_s,prompt_tokens,output_tokens\n0,1,1\nx,1,1\n", "trace:3: expected numbers, got arrival_s='x'"),
        ("arrival_s,prompt_tokens,output_tokens\n0,1\n", "expected numbers"),
        ("arrival_s,prompt_tokens,output_tokens\nnan,1,1\n", "a time must be finite"),
        ("arrival_s,prompt_tokens,output_tokens\n0,0,1\n", "at least 1 token"),
        ('{"arrival_s":0}\n', "the columns are arrival_s"),
        ('{"arrival_s":0,"prompt_tokens":1,"output_tokens":1}\n{oops\n', "trace:2"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_arrivals(str(tmp_path / "none"))
