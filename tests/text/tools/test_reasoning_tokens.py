"""Tokens of the reasoning, however the text is cut into tokens."""

from __future__ import annotations

import random

import pytest

from eventlm.text.tools.message import MessageFormat
from eventlm.text.tools.reasoning_tokens import ReasoningTokens, reasoning_tokens
from tests.text.tools.cuttings import cut, formats

#: Before, reasoning and behind; the marks are between them.
TEXTS = [("", "\nhm, 日本?\n", "\n\nYes. <think> no </think>"), (" \n", "a </thin b", ""), ("", "", "x")]


def counter(tokens: list[bytes], *, is_open: bool) -> ReasoningTokens:
    return ReasoningTokens("<think>", "</think>", lambda token_id: tokens[token_id], is_open=is_open)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(("before", "inside", "behind"), TEXTS)
def test_a_token_counts_that_has_a_byte_of_the_reasoning(before: str, inside: str, behind: str, is_open: bool) -> None:
    head = "" if is_open else f"{before}<think>"
    text = f"{head}{inside}</think>{behind}"
    start, end = len(head.encode()), len(f"{head}{inside}".encode())
    for seed in range(200):
        tokens = [piece.encode() for piece in cut(random.Random(seed), text)]
        found = counter(tokens, is_open=is_open)
        expected = index = last = 0
        for number, token in enumerate(tokens):
            found.push([number])
            expected += bool(token) and index < end and index + len(token) > start and start < end
            index += len(token)
            assert last <= found.count
            last = found.count
        assert found.count == expected


def test_marks_that_are_one_token_each_do_not_count() -> None:
    tokens = [b"<think>", b"a", b"b", b"</think>", b"c"]
    found = counter(tokens, is_open=False)
    found.push([0, 1, 2])
    assert found.count == 2
    found.push([1, 3, 4, 0, 1])
    assert found.count == 3


def test_a_text_without_reasoning_has_none() -> None:
    found = counter([b"Yes", b"<think>", b"no"], is_open=False)
    found.push([0, 1, 2])
    assert found.count == 0
    assert reasoning_tokens(MessageFormat(), formats("none", "qwen3"), lambda _: b"") is None
    assert reasoning_tokens(MessageFormat(reasoning="open"), formats(), lambda _: b"") is None
