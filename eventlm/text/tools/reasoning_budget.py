"""A budget for reasoning, as rules of the reply's grammar: after so many tokens nothing but the end mark may follow.

Grammars are part of a request and are replayed with it, so a budget needs nothing else of the engine or the workers.
The rules count whole tokens: `<[7]>` is the token 7, `<[^7]>` any other, `<[*]>` any at all.
"""

from __future__ import annotations

from typing import NamedTuple

from eventlm.errors import InputError
from eventlm.text.grammar import lark_grammar
from eventlm.text.tokenizer import Tokenizer
from eventlm.text.tools.formats import Formats, ReasoningState

PARAM = "thinking_token_budget"


class ReasoningBudget(NamedTuple):
    """`num_tokens` of reasoning at most, between the marks whose tokens are `begin` and `end`.

    end_of_text: the id of llguidance's token for the end of a text, which may not come within the reasoning.
    """

    num_tokens: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    end_of_text: int

    def rules(self) -> list[str]:
        """Of `thinking`: the reasoning and its end mark."""
        thoughts = f"thought{{0,{self.num_tokens}}} " if self.num_tokens else ""
        return [f"thinking: {thoughts}{_spelled(self.end)}", f"thought: {self._outside(self.end)}"]

    def grammar(self, state: ReasoningState) -> str:
        """Of a reply that is free after its reasoning."""
        rules = [*self.rules(), "anything: <[*]>*"]
        if state == "open":
            start = "thinking anything"
        else:
            # Reasoning may not begin later, where it would have no budget.
            start = f"({_spelled(self.begin)} thinking anything | first later*)?"
            rules += [f"first: {self._outside(self.begin)}"]
            rules += ["later: <[*]>" if len(self.begin) > 1 else f"later: <[^{self.begin[0]}]>"]
        return lark_grammar("\n".join([f"start: {start}", *rules, ""]), PARAM)

    def _outside(self, mark: tuple[int, ...]) -> str:
        """A token that does not begin the mark; or its first one with another than its second, counted as one."""
        first, *others = mark
        single = f"<[^{first},{self.end_of_text}]>"
        return f"{single} | <[{first}]> <[^{first},{others[0]},{self.end_of_text}]>" if others else single


def reasoning_budget(num_tokens: int, formats: Formats, tokenizer: Tokenizer, vocab_size: int) -> ReasoningBudget:
    """The budget for a model's replies. Raises InputError if it cannot be kept."""
    found = formats.reasoning
    if found is None:
        raise InputError(
            PARAM, f"'{PARAM}' is not supported: the server knows no reasoning of this model (--reasoning-parser)."
        )
    begin, end = (_mark(tokenizer, mark) for mark in (found.begin, found.end))
    return ReasoningBudget(num_tokens, begin, end, tokenizer.grammar_vocab_size or vocab_size)


def _mark(tokenizer: Tokenizer, mark: str) -> tuple[int, ...]:
    token_ids = tuple(tokenizer.encode(mark, add_special_tokens=False))
    if b"".join(map(tokenizer.raw_token_bytes, token_ids)) != mark.encode():
        raise InputError(PARAM, f"'{PARAM}' is not supported by this model: its vocabulary cannot spell '{mark}'.")
    return token_ids


def _spelled(mark: tuple[int, ...]) -> str:
    return " ".join(f"<[{token_id}]>" for token_id in mark)
