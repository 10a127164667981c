"""Messages from texts: the same however the text is cut, for any text."""

from __future__ import annotations

import json
import random

import pytest

from eventlm.engine.backend import AnswerDelta, CallPart
from eventlm.engine.request import FinishedOutput
from eventlm.text.choice_output import ChoiceOutput
from eventlm.text.tools.call_parser import CallParser
from eventlm.text.tools.formats import Formats
from eventlm.text.tools.message import (
    CallDelta,
    MessageDelta,
    MessageFormat,
    MessageParser,
    MessagePart,
    end_of_call,
)
from eventlm.text.tools.parser_events import CallArguments, CallEnd, CallStart, Content, Reasoning
from eventlm.types import FinishReason
from tests.text.tools.cuttings import NAMES, cut, formats, parse_message, parse_pieces, random_text

NUM_TEXTS = 1500
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def told(pieces: list[str], format: MessageFormat, found: Formats) -> MessageDelta:
    parser = MessageParser(format, found)
    message = MessageDelta()
    for piece in pieces:
        message.add(parser.push(piece))
    return message


@pytest.mark.parametrize("tool_parser", ["hermes", "llama3_json"])
def test_messages_do_not_depend_on_how_the_text_was_cut(tool_parser: str) -> None:
    seen = {"calls": 0, "reasoning": 0, "content": 0}
    for number in range(NUM_TEXTS):
        draw = random.Random(number)
        text = random_text(draw)
        found = formats(tool_parser, draw.choice(["none", "qwen3", "deepseek_r1"]))
        format = MessageFormat(
            tool_names=NAMES,
            one_call=draw.random() < 0.2,
            reasoning=draw.choice(["closed", "possible", "open"]),
            shows_reasoning=draw.random() < 0.8,
        )
        whole, _ = parse_message(text, format, found)
        pieces = cut(draw, text)
        assert parse_pieces(pieces, format, found) == whole, (number, text, pieces)
        # So it is at any place of it: what is told of a stream's first half does not depend on its cutting.
        some = pieces[: draw.randint(0, len(pieces))]
        assert told(some, format, found) == told(["".join(some)], format, found), (number, text, some)
        assert [call.index for call in whole.calls] == list(range(len(whole.calls)))
        assert {call.name for call in whole.calls} <= set(NAMES)
        assert len(whole.calls) <= 1 or not format.one_call
        seen["calls"] += len(whole.calls)
        seen["reasoning"] += bool(whole.reasoning)
        seen["content"] += bool(whole.content)
    assert min(seen.values()) > NUM_TEXTS / 8


@pytest.mark.parametrize("tool_parser", ["hermes", "llama3_json"])
def test_nothing_of_a_text_without_calls_is_lost(tool_parser: str) -> None:
    num_without = 0
    for number in range(NUM_TEXTS):
        draw = random.Random(number)
        text = random_text(draw)
        parser = formats(tool_parser).tools.parser(NAMES)  # type: ignore[union-attr]
        pieces = [piece for part in cut(draw, text) for piece in parser.push(part)] + parser.close()
        if not any(isinstance(piece, CallStart) for piece in pieces):
            num_without += 1
            assert "".join(piece.text for piece in pieces if isinstance(piece, Content)) == text
        else:
            told = [piece.text for piece in pieces if isinstance(piece, (Content, CallArguments))]
            assert sum(map(len, told)) <= len(text)
    assert num_without > NUM_TEXTS / 8


def test_arguments_are_streamed() -> None:
    parser = MessageParser(MessageFormat(tool_names=NAMES), formats("hermes"))
    deltas = [
        (character, parser.push(character)) for character in 'Hi.\n<tool_call>{"name":"add","arguments":{"a":"é"}}'
    ]
    told = [(character, delta) for character, delta in deltas if delta]
    assert [delta.content for _, delta in told[:3]] == ["H", "i", "."]
    character, first = told[3]
    assert (character, first.calls) == ("{", [CallDelta(0, "add", "{")])
    assert [delta.calls for _, delta in told[4:]] == [[CallDelta(0, "", each)] for each in '"a":"é"}']


def test_one_call_ends_the_message() -> None:
    format = MessageFormat(tool_names=NAMES, one_call=True)
    message, parser = parse_message(f"Well.\n{CALL}\n{CALL} and more", format, formats("hermes"))
    assert message == MessageDelta("Well.", "", [CallDelta(0, "add", '{"a": 1}')])
    assert parser.is_over
    is_over = end_of_call(format, formats("hermes"))
    ends = [is_over(character) for character in CALL]
    assert ends.index(True) == CALL.index("}}") + 1
    assert all(ends[ends.index(True) :])


def test_a_call_within_reasoning_is_reasoning() -> None:
    found = formats("hermes", "qwen3")
    text = f"<think>\nMaybe {CALL}?\n</think>\n\nNo.\n\n{CALL}"
    message, _ = parse_message(text, MessageFormat(tool_names=NAMES, reasoning="possible"), found)
    assert message == MessageDelta("No.", f"Maybe {CALL}?", [CallDelta(0, "add", '{"a": 1}')])
    hidden, _ = parse_message(text, MessageFormat(tool_names=NAMES, reasoning="possible", shows_reasoning=False), found)
    assert hidden == MessageDelta("No.", "", message.calls)
    left_in, _ = parse_message(text, MessageFormat(reasoning="closed"), found)
    assert left_in == MessageDelta(text)
    assert MessageFormat(reasoning="closed").is_plain


def test_a_call_that_is_cut_short_is_not_complete() -> None:
    for length in range(len(CALL)):
        message, parser = parse_message(CALL[:length], MessageFormat(tool_names=NAMES), formats("hermes"))
        if message.calls:
            assert message.content == ""
            assert '{"a": 1}'.startswith(message.calls[0].arguments)
            assert parser.calls_are_complete == (length >= CALL.index("}}") + 2)
        else:
            assert message.content == CALL[:length]


def test_without_a_format_all_is_content() -> None:
    message, _ = parse_message(CALL, MessageFormat(tool_names=NAMES, reasoning="open"), Formats(None, None))
    assert message == MessageDelta(CALL)


def test_long_texts_in_small_pieces_take_linear_time() -> None:
    value = json.dumps({"text": "x" * 200_000})
    parser = CallParser(formats("hermes").tools.syntax, NAMES)  # type: ignore[union-attr]
    text = f'<tool_call>{{"name": "add", "arguments": {value}}}</tool_call>'
    pieces = [piece for index in range(0, len(text), 4) for piece in parser.push(text[index : index + 4])]
    assert "".join(piece.text for piece in pieces if isinstance(piece, CallArguments)) == value


def test_parts_are_in_the_order_of_the_text() -> None:
    format = MessageFormat(tool_names=NAMES, reasoning="possible")
    parser = MessageParser(format, formats("hermes", "qwen3"))
    text = f"<think>Hm.</think>One.\n{CALL}\nTwo.{CALL}"
    assert [*parser.parts(text), *parser.last_parts()] == [
        Reasoning("Hm."),
        Content("One."),
        CallDelta(0, "add", '{"a": 1}'),
        CallEnd(),
        Content("\nTwo."),
        CallDelta(1, "add", '{"a": 1}'),
        CallEnd(),
    ]


FOUND = [
    AnswerDelta("", reasoning="hm"),
    AnswerDelta("Well. "),
    AnswerDelta("<tool_call>", calls=[CallPart(0, "add", '{"a"'), CallPart(0, "", ": 1}")]),
    AnswerDelta("", calls=[CallPart(1, "sub", "")]),
    AnswerDelta("", calls=[CallPart(1, "", "{}")]),
]


def found_by_a_backend(reason: FinishReason, format: MessageFormat) -> tuple[list[MessagePart], MessageParser]:
    parser = MessageParser(format, formats("hermes", "qwen3"))
    outputs = [ChoiceOutput(0, delta.text, delta=delta) for delta in FOUND]
    outputs.append(ChoiceOutput(0, finished=FinishedOutput(0, reason, 9, 0)))
    return [part for output in outputs for part in parser.take(output)], parser


def test_what_a_backend_has_found_is_not_looked_for() -> None:
    parts, parser = found_by_a_backend("tool_calls", MessageFormat())
    assert parts == [
        Reasoning("hm"),
        Content("Well. "),
        Content("<tool_call>"),
        CallDelta(0, "add", '{"a": 1}'),
        CallEnd(),
        CallDelta(1, "sub", ""),
        CallDelta(1, "", "{}"),
        CallEnd(),
    ]
    assert (parser.num_calls, parser.calls_are_complete) == (2, True)


def test_a_backends_last_call_may_be_cut() -> None:
    parts, parser = found_by_a_backend("length", MessageFormat(shows_reasoning=False))
    assert parts[0] == Content("Well. ")
    assert parts[-1] == CallDelta(1, "", "{}")
    assert not parser.calls_are_complete
