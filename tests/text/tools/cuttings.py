"""Random texts and random cuttings of them, for parsers."""

from __future__ import annotations

import functools
import random

from eventlm.config import ServerConfig
from eventlm.text.tools.formats import Formats, find_formats
from eventlm.text.tools.message import MessageDelta, MessageFormat, MessageParser

NAMES = ("get_weather", "add")
#: What calls are made of, whole and broken, and what stands around them.
PARTS = (
    "<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>", "<", "</tool", "<tool_", "{", "}", "[", "]",
    '"', "\\", '\\"', ":", ",", ", ", ";", "; ", "\n", " ", "\n\n", '"name"', '"arguments"', '"parameters"',
    '"get_weather"', '"add"', '"nope"', '{"name": "add", "arguments": ', '{"name": "get_weather", "parameters": ',
    '{"city": "Zürich 🙂"}', '{"a": 1, "b": [2, {"c": "</tool_call>"}]}', "null", "1", '"{\\"a\\": 1}"', "{}",
    '{"arguments": {"a": 1}, "name": "add"}', "Hello", "日本語", "🙂", "\u00e9", "\t", "\r\n", "\ud800",
)  # fmt: skip


@functools.cache
def formats(tool_parser: str = "none", reasoning_parser: str = "none") -> Formats:
    return find_formats(ServerConfig(tool_parser=tool_parser, reasoning_parser=reasoning_parser), None)


def random_text(draw: random.Random) -> str:
    if draw.random() < 0.3:
        return "".join(draw.choices(PARTS, k=draw.randint(0, 30)))
    # Mostly well-formed, with something wrong now and then.
    text = draw.choice(["", "", "Hello\n", "<think>\nhm, 🙂\n</think>\n\n", "hm</think>"])
    for _ in range(draw.randint(0, 3)):
        key = draw.choice(["arguments", "parameters"])
        call = f'{{"name": "{draw.choice([*NAMES, "nope"])}", "{key}": {{"city": "Zürich 🙂", "n": [1, {{}}]}}}}'
        text += draw.choice(["<tool_call>\n", "<tool_call>", "", "<|python_tag|>"]) + call
        text += draw.choice(["\n</tool_call>", "</tool_call>\n", "; ", "", "}"])
    for _ in range(draw.choice([0, 0, 1, 3])):
        index = draw.randint(0, len(text))
        text = text[:index] + draw.choice(PARTS) + text[draw.choice([index, index + 1]) :]
    return text


def cut(draw: random.Random, text: str) -> list[str]:
    if draw.random() < 0.3:
        return list(text)
    indices = sorted(draw.randint(0, len(text)) for _ in range(draw.randint(0, 8)))
    return [text[start:end] for start, end in zip([0, *indices], [*indices, len(text)], strict=True)]


def parse_message(text: str, format: MessageFormat, found: Formats) -> tuple[MessageDelta, MessageParser]:
    """The message of a whole text, and its parser."""
    parser = MessageParser(format, found)
    message = parser.push(text)
    message.add(parser.close())
    return message, parser


def parse_pieces(pieces: list[str], format: MessageFormat, found: Formats) -> MessageDelta:
    parser = MessageParser(format, found)
    message = MessageDelta()
    for piece in pieces:
        message.add(parser.push(piece))
    message.add(parser.close())
    return message
