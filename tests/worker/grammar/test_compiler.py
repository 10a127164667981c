"""Which matchers a worker keeps: as many as can be waiting, unless they are large."""

from __future__ import annotations

import pytest

from eventlm.text.grammar import choice_grammar
from eventlm.worker.grammar import compiler as grammar_compiler
from eventlm.worker.grammar.compiler import GrammarCompiler
from eventlm.worker.grammar.vocabulary import fake_vocabulary


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that were built, in order."""
    found: list[str] = []
    build = grammar_compiler.build_matcher

    def counted(tokenizer: grammar_compiler.LLTokenizer, grammar: str) -> grammar_compiler.LLMatcher:
        found.append(grammar)
        return build(tokenizer, grammar)

    monkeypatch.setattr(grammar_compiler, "build_matcher", counted)
    return found


def test_grammars_of_a_long_queue_are_built_once(built: list[str]) -> None:
    compiler = GrammarCompiler(fake_vocabulary)
    grammars = [choice_grammar([f"a{number}"], "p") for number in range(400)]
    for future in [compiler.prepare(grammar) for grammar in grammars]:
        future.result()
    for grammar in grammars:
        compiler.matcher(grammar)
    assert sorted(built) == sorted(grammars)


def test_the_grammars_used_longest_ago_are_given_up_first(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(fake_vocabulary)
    first, second, third = (choice_grammar([text * 20], "p") for text in "abc")
    monkeypatch.setattr(grammar_compiler, "_MAX_KEPT", grammar_compiler._BASE_CHARACTERS * 2 + len(first) * 2)
    for grammar in (first, second, first, third, first, third, second):
        compiler.matcher(grammar)
    assert built == [first, second, third, second]
    # One that is larger than all that may be kept is there as long as nothing else is.
    large = choice_grammar(["d" * 20_000], "p")
    for _ in range(2):
        compiler.matcher(large)
    assert built[4:] == [large]
