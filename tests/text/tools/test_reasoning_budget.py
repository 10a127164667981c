"""Budgets of reasoning: exactly so many tokens, then the end mark, then what the reply may be."""

from __future__ import annotations

import random
from typing import Any

import pytest

from eventlm.errors import InputError
from eventlm.grammars import build_matcher, make_tokenizer
from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.text.grammar import choice_grammar
from eventlm.text.grammar_checker import GrammarChecker
from eventlm.text.tools.call_grammar import reply_grammar
from eventlm.text.tools.formats import NO_FORMATS, ReasoningState
from eventlm.text.tools.reasoning_budget import ReasoningBudget, reasoning_budget
from tests.text.tools.cuttings import formats

THINK, UNTHINK, OTHER = 256, 257, 258
TOKENS = [bytes([byte]) for byte in range(256)] + [b"<think>", b"</think>", b"<tool>"]
END = len(TOKENS)
FORMATS = formats(reasoning_parser="qwen3")
#: Marks of one token, and spelled in bytes.
ONE = ReasoningBudget(3, (THINK,), (UNTHINK,), END)
SPELLED = ReasoningBudget(3, tuple(b"<think>"), tuple(b"</think>"), END)


def matcher(grammar: str) -> Any:
    return build_matcher(make_tokenizer(TOKENS, {OTHER: b"<tool>"}), grammar)


def allowed(found: Any) -> set[int]:
    mask = int.from_bytes(found.compute_bitmask(), "little")
    return {token_id for token_id in range(END + 1) if mask >> token_id & 1}


def after(grammar: str, *token_ids: int) -> set[int]:
    """What may follow these tokens, each of which had to be allowed."""
    found = matcher(grammar)
    for token_id in token_ids:
        assert token_id in allowed(found), token_id
        assert found.consume_token(token_id)
    return allowed(found)


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 1000])
def test_nothing_but_the_end_mark_follows_so_many_tokens(num_tokens: int) -> None:
    grammar = ONE._replace(num_tokens=num_tokens).grammar("open")
    draw = random.Random(num_tokens)
    thoughts = [draw.choice([*range(256), OTHER]) for _ in range(num_tokens)]
    assert after(grammar, *thoughts) == {UNTHINK}
    # What follows is free, and may end at any time.
    assert after(grammar, *thoughts, UNTHINK) == after(grammar, *thoughts, UNTHINK, OTHER, UNTHINK) == {*range(END + 1)}
    if num_tokens > 1:
        # The text may not end within the reasoning; an earlier end of it is the model's own.
        assert after(grammar, *thoughts[:-1]) == {*range(END)}
        assert after(grammar, UNTHINK) == {*range(END + 1)}


def test_reasoning_that_may_begin() -> None:
    grammar = ONE.grammar("possible")
    assert after(grammar) == {*range(END + 1)}
    assert after(grammar, THINK, *b"abc") == {UNTHINK}
    # Where it did not begin it may not begin later.
    assert after(grammar, 10) == {*range(END + 1)} - {THINK}


def test_marks_of_several_tokens() -> None:
    grammar = SPELLED.grammar("open")
    assert after(grammar, *b"abc") == {ord("<")}
    assert after(grammar, *b"abc<") == {ord("/")}
    assert after(grammar, *b"abc</think>") == {*range(END + 1)}
    assert after(grammar, *b"a</think>") == {*range(END + 1)}
    # The mark's first token may stand for itself.
    assert after(grammar, *b"a<bc") == {ord("<")}
    assert after(SPELLED.grammar("possible"), *b"<think>abc") == {ord("<")}
    assert after(SPELLED.grammar("possible"), *b"<b>abcd") == {*range(END + 1)}


@pytest.mark.parametrize("state", ["open", "possible"])
@pytest.mark.parametrize("budget", [ONE, SPELLED])
async def test_a_constrained_reply_follows(state: ReasoningState, budget: ReasoningBudget) -> None:
    checker = GrammarChecker([])
    try:
        content = choice_grammar(["yes", "no"], "x")
        grammar = await reply_grammar(None, FORMATS, state, frozenset(), content, checker, budget)
        plain = await reply_grammar(None, FORMATS, "closed", frozenset(), content, checker, budget)
    finally:
        checker.close()
    assert plain == content
    begin = list(b"<think>") if state == "possible" else []
    assert after(grammar, *begin, *b"abc", *budget.end, *b"ye") == {ord("s")}
    assert after(grammar, *begin, *b"abc") == {budget.end[0]}
    if state == "possible":
        assert after(grammar, *b"n") == {ord("o")}


async def test_without_a_budget_nothing_changes() -> None:
    checker = GrammarChecker([])
    assert await reply_grammar(None, FORMATS, "open", frozenset(), "", checker) == ""
    assert await reply_grammar(None, FORMATS, "closed", frozenset(), "", checker, ONE) == ""


def test_the_marks_are_those_of_the_vocabulary() -> None:
    tokenizer = FakeTokenizer()
    assert reasoning_budget(5, FORMATS, tokenizer, 1024) == (5, tuple(b"<think>"), tuple(b"</think>"), 260)
    with pytest.raises(InputError, match="knows no reasoning of this model") as caught:
        reasoning_budget(5, NO_FORMATS, tokenizer, 1024)
    assert caught.value.param == "thinking_token_budget"
