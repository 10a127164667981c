"""Stop strings: found at the first possible character, however the text is cut, and nothing sent too early."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventlm.text.stop_strings import StopMatcher, StopStrings

# A small alphabet makes overlaps and false starts frequent.
texts = st.text(alphabet="abé🙂", max_size=40)
stops_lists = st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=5), min_size=1, max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """Text before the stop that is complete first; the longest one if several are."""
    for end in range(1, len(text) + 1):
        completed = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if completed:
            return text[: end - max(completed)], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(StopStrings(stops))
    sent = ""
    for piece in pieces:
        sent += matcher.push(piece)
        if matcher.found:
            return sent, True
    return sent + matcher.release(), False


@given(text=texts, stops=stops_lists, cuts=st.lists(st.integers(0, 40)))
def test_any_cut_gives_the_text_before_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[start:end] for start, end in pairwise(borders)]
    assert run(pieces, stops) == reference(text, stops)


@given(text=texts, stops=stops_lists)
def test_what_is_sent_early_never_has_to_be_taken_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    sent, final = "", reference(text, stops)[0]
    for index, character in enumerate(text, start=1):
        sent += matcher.push(character)
        assert final.startswith(sent)
        if matcher.found:
            break
        held = text[len(sent) : index]
        # Held back is exactly what may still become a stop string.
        assert held == max((p for p in suffixes(text[:index]) if any(s.startswith(p) for s in stops)), key=len)


def suffixes(text: str) -> list[str]:
    return [text[start:] for start in range(len(text) + 1)]


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["a", "b", "c"], ["abc"], ("", True)),
        (["xa", "b", "d"], ["abc"], ("xabd", False)),
        (["aa", "ab"], ["aab"], ("a", True)),
        (["abc"], ["abc", "b"], ("a", True)),
        (["xabc"], ["c", "abc"], ("x", True)),
        (["a", ".", "*"], [".*"], ("a", True)),
        (["]^\\-"], ["^\\", "]x"], ("]", True)),
    ],
)
def test_examples(pieces: list[str], stops: list[str], expected: tuple[str, bool]) -> None:
    assert run(pieces, stops) == expected
