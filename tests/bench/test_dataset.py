"""Files of prompts, right and wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.bench.dataset import DatasetPrompt, read_prompts
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
