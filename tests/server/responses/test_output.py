"""The output while it grows."""

from __future__ import annotations

from typing import Any

from eventlm.server.openai.chat import call_id
from eventlm.server.openai.replies import TokenLogprob
from eventlm.server.responses.output import ResponseOutput
from eventlm.server.responses.replies import FunctionCallItem, OutputMessage
from eventlm.text.tools.message import CallDelta
from eventlm.text.tools.parser_events import CallEnd, Content, Reasoning


def names(events: list[Any]) -> list[str]:
    return [type(event).__name__ for event in events]


def test_ids_are_those_of_the_response() -> None:
    def ids(reply_id: str) -> list[str]:
        output = ResponseOutput(reply_id)
        for part in (
            Reasoning("a"),
            Content("b"),
            CallDelta(0, "f", "{}"),
            CallEnd(),
            CallDelta(1, "g", ""),
            CallEnd(),
        ):
            output.add(part)
        output.end("completed")
        assert [item.call_id for item in output.items if isinstance(item, FunctionCallItem)] == [
            call_id(reply_id, 0, 0),
            call_id(reply_id, 0, 1),
        ]
        return [item.id for item in output.items]

    assert ids("resp_1") == ids("resp_1")
    assert len({*ids("resp_1"), *ids("resp_2")}) == 8


def test_numbers_go_on_from_one_event_to_the_next() -> None:
    output = ResponseOutput("resp_1")
    assert output.number() == 0
    events = [*output.add(Content("a")), *output.add(Content("b")), *output.end("completed")]
    assert [event.sequence_number for event in events] == list(range(1, len(events) + 1))
    assert output.number() == len(events) + 1


def test_a_call_without_arguments_has_no_delta() -> None:
    output = ResponseOutput("resp_1")
    assert names(output.add(CallDelta(0, "f", ""))) == ["OutputItemAdded"]
    assert names(output.add(CallEnd())) == ["CallArgumentsDone", "OutputItemDone"]
    assert names(output.end("completed")) == []


def test_logprobs_of_tokens_without_text_are_the_last_of_a_message() -> None:
    first, last = (TokenLogprob(token, -1.0, [], []) for token in ("a", "<end>"))
    output = ResponseOutput("resp_1")
    output.add(Content("a"), [first])
    delta, *_ = output.end("completed", [last])
    assert (delta.delta, delta.logprobs) == ("", [last])
    [item] = output.items
    assert isinstance(item, OutputMessage)
    assert item.content[0].logprobs == [first, last]


def test_nothing_is_left_to_end_twice() -> None:
    output = ResponseOutput("resp_1")
    assert output.end_item("incomplete") == []
    output.add(Reasoning("a"))
    assert names(output.end("completed")) == ["ReasoningTextDone", "ContentPartDone", "OutputItemDone"]
    assert output.end_item("completed") == []
    assert len(output.items) == 1
