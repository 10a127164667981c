"""Grammars as llguidance takes them, and the limits within which they are built.

A grammar comes from a client. llguidance bounds what it computes by fuel, but it descends recursively through chains of
rules and `$ref`s, and an overflow of the stack ends the process. So grammars have a largest size, and are built in
threads whose stacks hold the longest chain that fits into it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from eventlm.errors import EventLMError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

#: A chain of 20,000 rules, which is longer than any of this size, needs less than half of the stack.
MAX_GRAMMAR_CHARACTERS = 128 * 1024
_STACK_BYTES = 256 * 1024 * 1024

#: llguidance's own limits are a second's work for one token; these are some ten milliseconds'.
_INITIAL_LEXER_FUEL = 100_000
_STEP_LEXER_FUEL = 50_000


#: Bytes of a text to token ids.
Tokenize = Callable[[bytes], list[int]]


class _Vocabulary:
    """What llguidance needs of a tokenizer. The end of a text is a token of its own, after all others."""

    bos_token_id = None

    def __init__(self, token_bytes: Sequence[bytes], special_bytes: Mapping[int, bytes], tokenize: Tokenize) -> None:
        self.eos_token_id = len(token_bytes)
        self.tokens = [special_bytes.get(token_id, token) for token_id, token in enumerate(token_bytes)] + [b"<|end|>"]
        self.special_token_ids = [*special_bytes, self.eos_token_id]
        self._tokenize = tokenize

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenize(text)


def make_tokenizer(
    token_bytes: Sequence[bytes], special_bytes: Mapping[int, bytes], tokenize: Tokenize = list
) -> LLTokenizer:
    """A vocabulary for matchers: the bytes of each token (none for ids without one), and names of special tokens by id.

    tokenize: the tokens of a text, UTF-8, whose bytes must be the text's; a grammar that leaves no choice gets these.
    As it is, for a vocabulary that begins with all bytes. In masks, the bit after the last token says whether the text
    may end.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Vocabulary(token_bytes, special_bytes, tokenize)))


#: A grammar that is nothing but a regex, as `LLMatcher.grammar_from_regex` writes it.
_LONE_REGEX = re.compile(r"at 1\(8\): invalid regex .* \(in regex\): (.*)\n +1 \| start: /.*", re.DOTALL)
#: An option of llguidance's own, which clients cannot set, and what they can do.
_ONE_OF_ADVICE = ". Enable 'coerce_one_of' option to approximate oneOf with anyOf"
_ONE_OF_REMEDY = " where two of its schemas may match the same value; use anyOf"


class GrammarError(EventLMError):
    """A grammar that cannot be used. The message may quote it, so it is for its client and for no log."""


def build_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the start of its grammar, which has computed its first mask once. Raises GrammarError.

    To be called in one of `GrammarThreads`.
    """
    from llguidance import LLMatcher

    if len(grammar) > MAX_GRAMMAR_CHARACTERS:
        raise GrammarError(f"it has {len(grammar)} characters, and at most {MAX_GRAMMAR_CHARACTERS} are allowed")
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_limits())
    if not matcher.is_error():
        # Much of the work is put off until the first mask; and whether anything matches shows only there.
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(matcher_error(matcher))
    return matcher


def matcher_error(matcher: LLMatcher) -> str:
    """What is wrong with a matcher, in a client's terms.

    Without llguidance's picture of its state, the grammar around a lone regex, and advice that no client can follow.
    """
    text = matcher.get_error().partition("\n<")[0].strip()
    if lone := _LONE_REGEX.fullmatch(text):
        text = lone[1]
    text = text.replace(_ONE_OF_ADVICE, _ONE_OF_REMEDY)
    return "nothing can match it" if text.startswith("NoExtension") else text


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=_INITIAL_LEXER_FUEL, step_lexer_fuel=_STEP_LEXER_FUEL, verbose_errors=False
    )


class GrammarThreads(ThreadPoolExecutor):
    """Threads with stacks deep enough for any grammar. Only what is used of a stack takes memory."""

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads, thread_name_prefix="grammar")
        # Threads start when there is work for them, and have the stack size in force at that moment.
        everybody = threading.Barrier(num_threads)
        before = threading.stack_size(_STACK_BYTES)
        try:
            list(self.map(lambda _: everybody.wait(), range(num_threads)))
        finally:
            threading.stack_size(before)
