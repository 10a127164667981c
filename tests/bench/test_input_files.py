"""Files of prompts and of arrivals, right and wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.bench.input_files import Arrival, DatasetPrompt, read_arrivals, read_prompts
from eventlm.errors import UsageError


def read(tmp_path: Path, name: str, text: str | bytes) -> list[DatasetPrompt]:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_prompts(str(path))


def test_text_lines(tmp_path: Path) -> None:
    assert read(tmp_path, "p.txt", "one\n\n two words \r\nü") == [
        DatasetPrompt("one"),
        DatasetPrompt("two words"),
        DatasetPrompt("ü"),
    ]


def test_json_lines(tmp_path: Path) -> None:
    messages = '[{"role":"user","content":"hi"}]'
    lines = f'{{"prompt":"a","max_tokens":5}}\n\n{{"messages":{messages},"output_tokens":7,"id":1}}\n"b"\n'
    assert read(tmp_path, "p.jsonl", lines) == [
        DatasetPrompt("a", 5),
        DatasetPrompt([{"role": "user", "content": "hi"}], 7),
        DatasetPrompt("b"),
    ]


def test_sharegpt(tmp_path: Path) -> None:
    turns = '[{"from":"human","value":"Q"},{"from":"gpt","value":"A b c"},{"from":"human","value":"more"}]'
    text = f'[{{"id":"x","conversations":{turns}}},{{"id":"y","conversations":[{{"from":"human","value":"z"}}]}}]'
    assert read(tmp_path, "p.json", text) == [DatasetPrompt("Q", None, "A b c")]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.txt", " \n\n", "there is no prompt"),
        ("p.json", "[]", "there is no prompt"),
        ("p.txt", b"\xff\xfe", "not UTF-8 text"),
        ("p.jsonl", '{"prompt":"a"}\n{broken', r"p\.jsonl:2: "),
        ("p.jsonl", '{"text":"a"}', "neither a `prompt`"),
        ("p.jsonl", '{"prompt":""}', "neither a `prompt`"),
        ("p.jsonl", '{"messages":[]}', "neither a `prompt`"),
        ("p.jsonl", '{"prompt":"a","max_tokens":0}', "max_tokens is 0"),
        ("p.jsonl", "7", "expected an object"),
        ("p.json", '{"prompt":"a"}', "expected a list"),
        ("p.json", '[{"prompt":"a"},7]', "entry 1"),
        ("p.json", "[", "truncated"),
    ],
)
def test_mistakes(tmp_path: Path, name: str, text: str | bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(tmp_path, name, text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_prompts(str(tmp_path / "none.txt"))
    with pytest.raises(UsageError, match="Is a directory"):
        read_prompts(str(tmp_path))


EXPECTED = [Arrival(0.0, 10, 5), Arrival(0.5, 20, 6), Arrival(2.0, 30, 7)]


def read_trace(tmp_path: Path, text: str) -> list[Arrival]:
    path = tmp_path / "trace"
    path.write_text(text)
    return read_arrivals(str(path))


def test_csv_of_any_order_and_origin(tmp_path: Path) -> None:
    text = "output_tokens, arrival_s,prompt_tokens,note\n6,100.5,20,x\n5,100,10,y\n7,102,30,\n"
    assert read_trace(tmp_path, text) == EXPECTED


def test_csv_with_a_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    text = "\ufeffarrival_s,prompt_tokens,output_tokens\r\n0,10,5\r\n0.5,20,6\r\n2,30,7\r\n"
    assert read_trace(tmp_path, text) == EXPECTED


def test_a_trace_in_json_lines(tmp_path: Path) -> None:
    lines = [
        f'{{"arrival_s":{7 + a.arrival_s},"prompt_tokens":{a.prompt_tokens},"output_tokens":{a.output_tokens}}}'
        for a in EXPECTED
    ]
    assert read_trace(tmp_path, "\n\n".join(lines)) == EXPECTED


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
def test_mistakes_in_a_trace(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_trace(tmp_path, text)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_arrivals(str(tmp_path / "none"))
