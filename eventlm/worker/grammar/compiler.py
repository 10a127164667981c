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

#: Bound on the grammars whose matchers are kept, in characters. A matcher takes some 100 bytes for each, and as if it
#: had so many more of them. That is room for the small grammars of a full queue, whose order no one knows: one that was
#: given up would be built again while a step waits for it.
_MAX_KEPT = 2 * 1024 * 1024
_BASE_CHARACTERS = 1024
_NUM_THREADS = 2


class GrammarCompiler:
    """Matchers at the start of their grammars, each built once.

    vocabulary: makes the tokenizer that all of them share; called in a thread at the first grammar.
    """

    def __init__(self, vocabulary: Callable[[], LLTokenizer]) -> None:
        self._vocabulary = vocabulary
        self._matchers: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._tokenizer: Future[LLTokenizer] | None = None
        self._num_kept = 0

    def prepare(self, grammar: str) -> Future[LLMatcher]:
        """The matcher, when it is built; it raises GrammarError if that cannot be done."""
        future = self._matchers.get(grammar)
        if future is None:
            if self._tokenizer is None:
                self._tokenizer = self._threads.submit(self._vocabulary)
            future = self._matchers[grammar] = self._threads.submit(self._build, self._tokenizer, grammar)
            self._num_kept += _BASE_CHARACTERS + len(grammar)
            while self._num_kept > _MAX_KEPT and len(self._matchers) > 1:
                oldest, _ = self._matchers.popitem(last=False)
                self._num_kept -= _BASE_CHARACTERS + len(oldest)
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
