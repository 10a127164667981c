"""Streams of the kinds of servers, cut anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eventlm.engine.backend import AnswerDelta, AnswerEnd, AnswerUsage, BackendError, CallPart
from eventlm.gateway.answers import AnswerReader
from eventlm.gateway.counts import MOST


def event(choice: dict[str, Any] | None = None, **more: Any) -> bytes:
    choices = [] if choice is None else [{"index": 0} | choice]
    return b"data: " + json.dumps({"choices": choices} | more).encode() + b"\n\n"


def usage(completion: int, **more: Any) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": 9, "completion_tokens": completion} | more}


def read(*events: bytes, size: int = 1 << 20) -> tuple[list[AnswerDelta], AnswerEnd]:
    """What an answer's bytes bring when they come `size` at once."""
    data = b"".join(events)
    reader = AnswerReader("http://h", key="")
    found = [reader.feed(data[start : start + size]) for start in range(0, len(data), size)]
    found.append(reader.finish())
    return [delta for delta in found if delta is not None], reader.end()


STOP = event({"delta": {}, "finish_reason": "stop"})


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_parts_of_an_answer(size: int) -> None:
    deltas, ended = read(
        event({"delta": {"role": "assistant", "content": ""}}),
        event({"delta": {"reasoning": "h"}}),
        event({"delta": {"reasoning_content": "m", "reasoning": "m"}}),
        event({"delta": {"content": "é"}}),
        event({"delta": {"tool_calls": [{"index": 1, "function": {"name": "f", "arguments": ""}}]}}),
        event({"delta": {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]}}),
        event({"delta": {}, "finish_reason": "tool_calls"}),
        event(None, **usage(11, prompt_tokens_details={"cached_tokens": 4},
                            completion_tokens_details={"reasoning_tokens": 2})),
        b"data: [DONE]\n\n",
        size=size,
    )  # fmt: skip
    assert "".join(delta.text for delta in deltas) == "é"
    assert "".join(delta.reasoning for delta in deltas) == "hm"
    assert [call for delta in deltas for call in delta.calls] == [CallPart(1, "f", ""), CallPart(1, "", "{}")]
    assert sum(delta.num_tokens for delta in deltas) == 5
    assert ended == AnswerEnd("tool_calls", AnswerUsage(9, 11, 4, 2))
    if size == 1000:
        assert len(deltas) < 3


def test_chunks_of_several_tokens_are_not_counted() -> None:
    text = event({"delta": {"content": "two tokens"}})
    [delta], _ = read(text, STOP)
    assert (delta.num_tokens, delta.is_counted) == (1, False)
    [delta], _ = read(text.replace(b"}]}", b'}], "usage": {"completion_tokens": 2}}'), STOP)
    assert (delta.num_tokens, delta.is_counted) == (2, True)
    [delta], _ = read(event({"text": "ab", "token_ids": [5, 6]}), STOP)
    assert (delta.num_tokens, delta.is_counted) == (2, True)
    delta_of_one = AnswerReader("http://h", key="", has_token_chunks=True).feed(text)
    assert delta_of_one is not None
    assert (delta_of_one.num_tokens, delta_of_one.is_counted) == (1, True)


def test_numbers_that_are_no_counts() -> None:
    deltas, ended = read(
        event({"text": "a", "finish_reason": "stop", "stop_reason": 10**30}, **usage(-3)),
        event(None, **usage(10**30, prompt_tokens_details={"cached_tokens": -1})),
    )
    assert [delta.num_tokens for delta in deltas] == [1]
    assert ended == AnswerEnd("stop", AnswerUsage(9, MOST, -1, -1))


@pytest.mark.parametrize(
    "choice", [{"token_ids": [10**30]}, {"delta": {"tool_calls": [{"index": -1, "function": {"name": "f"}}]}}]
)
def test_numbers_that_are_no_positions(choice: dict[str, Any]) -> None:
    with pytest.raises(BackendError, match="an event that is no chunk"):
        read(event(choice))


def test_tokens_as_the_backend_counts_them() -> None:
    deltas, _ = read(
        event({"delta": {"content": ""}}, **usage(0)),
        event({"delta": {"content": "abc"}}, **usage(3)),
        # Held back by a parser.
        event({"delta": {}}, **usage(5)),
        event({"delta": {}, "finish_reason": "stop"}, **usage(6)),
        size=1,
    )
    assert [(delta.text, delta.num_tokens) for delta in deltas] == [("abc", 3), ("", 2), ("", 1)]


def test_token_ids_are_counted() -> None:
    deltas, _ = read(event({"text": "ab", "token_ids": [1, 2]}), event({"text": "", "token_ids": [3]}), STOP)
    assert deltas == [AnswerDelta("ab", 3, token_ids=[1, 2, 3])]


@pytest.mark.parametrize(
    ("parts", "joined"),
    [
        (
            [{"content": [{"token": "a", "logprob": -1.5}]}, {"content": [{"token": "b", "logprob": 0}]}],
            [{"token": "a", "logprob": -1.5}, {"token": "b", "logprob": 0}],
        ),
        (
            [
                {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0}], "text_offset": [0]},
                {"tokens": ["b"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [1]},
            ],
            {
                "tokens": ["a", "b"], "token_logprobs": [-1.0, None], "top_logprobs": [{"a": -1.0}, None],
                "text_offset": [0, 1],
            },
        ),
        ([{"content": None}, None], None),
    ],
)  # fmt: skip
def test_logprobs(parts: list[Any], joined: Any) -> None:
    deltas, _ = read(*(event({"text": "x", "logprobs": part}) for part in parts), STOP)
    assert (json.loads(deltas[0].logprobs) if deltas[0].logprobs else None) == joined


@pytest.mark.parametrize(
    ("choice", "ended"),
    [
        ({"finish_reason": "stop"}, AnswerEnd("stop")),
        ({"finish_reason": "length"}, AnswerEnd("length")),
        ({"finish_reason": "content_filter"}, AnswerEnd("stop")),
        ({"finish_reason": "stop", "stop_reason": "END"}, AnswerEnd("stop", stop_reason="END")),
        ({"finish_reason": "stop", "matched_stop": 7}, AnswerEnd("stop", stop_reason=7)),
        ({"finish_reason": "stop", "stop_reason": {"odd": 1}}, AnswerEnd("stop")),
    ],
)
def test_ends(choice: dict[str, Any], ended: AnswerEnd) -> None:
    assert read(event({"text": ""} | choice))[1] == ended


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (b"", "broken", "without a finish reason"),
        (b"data: [DONE]\n\n", "broken", "without a finish reason"),
        (event({"text": "", "finish_reason": "abort"}), "server", "gave the answer up"),
        (b'data: {"error": {"message": "out of memory", "code": 500}}\n\n', "server", "http://h failed: out of memory"),
        (b'data: {"error": {"message": "too long", "code": 400, "param": "prompt"}}\n\n', "refused", "^too long$"),
        (b'data: {"error": {"message": "later", "code": 429}}\n\n', "overloaded", "later"),
        (b'error: "odd"\n\n', "server", "odd"),
        (b"data: {\n\n", "protocol", "an event that is no chunk"),
        (b"data: \xff\n\n", "protocol", "an event that is no chunk"),
        (event({"text": "x", "logprobs": {"content": 5}}), "protocol", "an event that is no chunk"),
    ],
)
def test_answers_that_fail(data: bytes, kind: str, message: str) -> None:
    with pytest.raises(BackendError, match=message) as caught:
        read(data)
    assert caught.value.kind == kind


def test_what_came_before_an_error_is_shown() -> None:
    reader = AnswerReader("http://h", key="")
    delta = reader.feed(event({"text": "ab"}) + b'data: {"error": "x"}\n\n' + event({"text": "no"}))
    assert delta == AnswerDelta("ab", 1, is_counted=False)
    assert reader.is_over
