"""Lines of inputs: what a request is, what is wrong with others, and what stands in the output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from eventlm.server.batches.lines import (
    EndedLine,
    InputLine,
    LineError,
    read_lines,
    with_response,
    without_response,
)
from eventlm.server.errors import ApiError
from eventlm.system.disk import SYSTEM_DISK
from tests.server.batches.input_files import CHAT, chat_line, jsonl

URLS = (CHAT, "/v1/embeddings")


def read(folder: Path, *lines: Any, endpoint: str = CHAT, max_bytes: int = 1000, data: bytes = b"") -> list[InputLine]:
    path = folder / "input.jsonl"
    path.write_bytes(data or jsonl(*lines))
    file = SYSTEM_DISK.open(path)
    try:
        return list(read_lines(file, URLS, endpoint=endpoint, max_bytes=max_bytes))
    finally:
        file.close()


#: A line, the code and the param of its error, and words in the message.
WRONG: list[tuple[Any, str, str | None, str]] = [
    (b"{nope", "invalid_json_line", None, "not valid JSON"),
    (b"\xff", "invalid_json_line", None, "not valid JSON"),
    (b"[" * 20_000, "line_too_long", None, "larger than the limit of 1000 bytes"),
    (b"[" * 900, "invalid_json_line", None, "not valid JSON"),
    (b"[1]", "invalid_type", None, "it must be a JSON object"),
    ({"method": "POST", "url": CHAT, "body": {}}, "missing_required_parameter", "custom_id", "'custom_id'"),
    (chat_line("a") | {"custom_id": 7}, "invalid_type", "custom_id", "'custom_id'"),
    (chat_line("a") | {"custom_id": ""}, "invalid_value", "custom_id", "'custom_id'"),
    (chat_line("a") | {"body": "hi"}, "invalid_type", "body", "'body'"),
    (chat_line("a") | {"method": "GET"}, "invalid_method", "method", "must be POST, got 'GET'"),
    (chat_line("a", url="/v1/embeddings"), "mismatched_endpoint", "url", f"must be the batch's endpoint {CHAT}"),
    (chat_line("first"), "duplicate_custom_id", "custom_id", "'first' is that of an earlier line"),
    ({name: value for name, value in chat_line("a").items() if name != "url"}, "missing_required_parameter", "url", ""),
]


@pytest.mark.parametrize(("line", "code", "param", "words"), WRONG)
def test_a_wrong_line_is_named_by_its_number(
    tmp_path: Path, line: Any, code: str, param: str | None, words: str
) -> None:
    first, wrong, last = read(tmp_path, chat_line("first"), line, chat_line("last"))
    assert (first.custom_id, first.error, last.custom_id, last.error) == ("first", None, "last", None)
    assert wrong.error is not None
    assert (wrong.number, wrong.error.line, wrong.error.code, wrong.error.param) == (2, 2, code, param)
    assert wrong.error.message.startswith("Line 2: ")
    assert wrong.error.message.endswith(".")
    assert words in wrong.error.message


def test_without_an_endpoint_each_line_names_any_url_that_there_is(tmp_path: Path) -> None:
    lines = read(tmp_path, chat_line("a"), chat_line("b", url=URLS[1]), chat_line("c", url="/v1/images"), endpoint="")
    assert [line.error and line.error.code for line in lines] == [None, None, "invalid_url"]


def test_a_body_stands_as_it_was_sent_and_empty_lines_count(tmp_path: Path) -> None:
    body = b'{"model": "m",  "seed": 18446744073709551615, "temperature": 1.10}'
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": %b}' % body
    [found] = read(tmp_path, data=b"\n  \r\n" + line)
    assert found == InputLine(3, "a", CHAT, body)


def test_a_custom_id_is_told_even_if_the_line_is_wrong(tmp_path: Path) -> None:
    [line] = read(tmp_path, chat_line("a") | {"url": 7})
    assert line.custom_id == "a"


def test_output_lines_say_which_line_they_are_of() -> None:
    line = InputLine(17, "a", CHAT)
    done = with_response("batch_req_x_", line, "b/a", {"usage": {"prompt_tokens": 3, "completion_tokens": 4}})
    failed = with_response("batch_req_x_", line, "b/a", ApiError(404, "No.", param="model"))
    never = without_response("batch_req_x_", line, LineError(code="batch_expired", message="Too late.", line=17))
    assert [each.is_completed for each in (done, failed, never)] == [True, False, False]
    assert msgspec.to_builtins(msgspec.json.decode(msgspec.json.encode(failed))) == {
        "id": "batch_req_x_17",
        "custom_id": "a",
        "response": {
            "status_code": 404,
            "request_id": "b/a",
            "body": {"error": {"message": "No.", "type": "invalid_request_error", "param": "model", "code": None}},
        },
        "error": None,
    }
    ended = [msgspec.json.decode(msgspec.json.encode(each), type=EndedLine) for each in (done, failed, never)]
    assert [(each.number, each.custom_id, each.is_completed) for each in ended] == [
        (17, "a", True),
        (17, "a", False),
        (17, "a", False),
    ]
    assert ended[0].usage is not None
    assert (ended[0].usage.prompt_tokens, ended[1].usage, ended[2].usage) == (3, None, None)
