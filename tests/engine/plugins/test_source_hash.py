"""The hash of what a plug-in's code does: what changes it, what does not, and that it is everywhere the same."""

from __future__ import annotations

import ast

import pytest

from eventlm.engine.plugins import source_hash as module
from eventlm.engine.plugins.source_hash import source_hash

SOURCE = '''
"""A policy."""

class Shortest(Policy, frozen=True):
    """The shortest goes first."""

    weight: int = 1

    def keys(self, sequences, now_ns):
        """One for each."""
        print(f"{now_ns:} {self.weight!r:>{now_ns}.3}", "\\u0378\\U0001fae8")
        return [self.weight * s.prompt_tokens for s in sequences]
'''
#: Taken with Python 3.11, 3.12 and 3.13.
HASH = "851a10afbf5a30bc"


def test_it_is_the_same_for_ever() -> None:
    assert source_hash(SOURCE) == HASH


@pytest.mark.parametrize("texts", [["at", ""], ["", "at"], [""]])
def test_an_empty_text_in_an_f_string_is_none(texts: list[str]) -> None:
    """Whether a version of Python puts one there or not, also where nothing else is in it."""
    with_empty = ast.JoinedStr(values=[ast.Constant(value=text) for text in texts])
    without = ast.JoinedStr(values=[ast.Constant(value=text) for text in texts if text])
    assert list(module._written(with_empty)) == list(module._written(without))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A policy."""', ""),
        ("The shortest goes first.", "Who is short goes first."),
        ("    weight: int = 1\n", '    weight: int = 1  # of a token\n    """Of a token."""\n'),
        ('"""One for each."""', "pass"),
        (
            "[self.weight * s.prompt_tokens for s in sequences]",
            "[(self.weight) * s.prompt_tokens\n  for s in sequences]",
        ),
        ('"\\u0378', 'u"\\u0378'),
        ("\n", "\r\n"),
    ],
)
def test_words_and_layout_do_not_count(old: str, new: str) -> None:
    assert old in SOURCE
    assert source_hash(SOURCE.replace(old, new)) == source_hash(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("weight: int = 1", "weight: int = 2"),
        ("weight: int = 1", "weight: int = True"),
        ("weight: int = 1", "weight: float = 1"),
        ("weight: int = 1", "weight: int = None"),
        ("self.weight * s", "self.weight + s"),
        ("s.prompt_tokens", "s.done_tokens"),
        ("!r:>", "!s:>"),
        ("print(f", "print('', f"),
        ("frozen=True", "frozen=False"),
        ("return [", "return -["),
        ("(self, sequences, now_ns)", "(self, sequences, *, now_ns)"),
    ],
)
def test_what_it_does_counts(old: str, new: str) -> None:
    assert old in SOURCE
    assert source_hash(SOURCE.replace(old, new)) != source_hash(SOURCE)
