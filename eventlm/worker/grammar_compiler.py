"""Builds the matchers of grammars in threads, and keeps those used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING

from eventlm.grammars import GrammarThreads, build_matcher

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: Most matchers that are kept, of a few hundred KB each and some MB for the largest grammars.
_NUM_KEPT = 128
_NUM_THREADS = 2


class GrammarCompiler:
    """Matchers at the start of their grammars, each built once.

    vocabulary: makes the tokenizer that all of them share; called in a thread at the first grammar.
    """

    def __init__(self, vocabulary: Callable[[], LLTokenizer]) -> None:
        self._vocabulary = vocabulary
        self._matchers: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._tokenizer: Future[LLTokenizer] | None = None

    def prepare(self, grammar: str) -> Future[LLMatcher]:
        """The matcher, when it is built; it raises GrammarError if that cannot be done."""
        future = self._matchers.get(grammar)
        if future is None:
            if self._tokenizer is None:
                self._tokenizer = self._threads.submit(self._vocabulary)
            future = self._matchers[grammar] = self._threads.submit(self._build, self._tokenizer, grammar)
            if len(self._matchers) > _NUM_KEPT:
                self._matchers.popitem(last=False)
        self._matchers.move_to_end(grammar)
        return future

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher of one's own, at the start. Waits until it is built; raises GrammarError."""
        return self.prepare(grammar).result().deep_copy()

    @staticmethod
    def _build(tokenizer: Future[LLTokenizer], grammar: str) -> LLMatcher:
        # Submitted before, so it has begun.
        return build_matcher(tokenizer.result(), grammar)

    @cached_property
    def _threads(self) -> GrammarThreads:
        return GrammarThreads(_NUM_THREADS)
