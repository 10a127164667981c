"""Detokenizing: whole characters only, the same text for every cut, stops counted in tokens."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from eventlm.text.detokenizer import Detokenizer, SequenceText
from eventlm.text.stop_strings import StopStrings

#: Tokens of one to three bytes that cut characters in the middle, valid and invalid ones.
_PIECES = [
    "🙂".encode()[:2],
    "🙂".encode()[2:],
    b"a",
    b"ab",
    "é".encode()[:1],
    "é".encode()[1:],
    b"\xff",
    "日".encode(),
    b"",
]
token_lists = st.lists(st.integers(0, len(_PIECES) - 1), max_size=30)


def whole(token_ids: list[int]) -> str:
    return b"".join(_PIECES[token_id] for token_id in token_ids).decode(errors="replace")


def cut(token_ids: list[int], indices: list[int]) -> list[list[int]]:
    borders = sorted({0, len(token_ids), *(min(index, len(token_ids)) for index in indices)})
    return [token_ids[start:end] for start, end in pairwise(borders)]


@given(token_ids=token_lists, places=st.lists(st.integers(0, 30)))
def test_pieces_join_to_the_whole(token_ids: list[int], places: list[int]) -> None:
    detokenizer = Detokenizer(_PIECES.__getitem__)
    pieces = [detokenizer.push(part) for part in cut(token_ids, places)]
    assert "".join(pieces) + detokenizer.flush() == whole(token_ids)


@given(text=st.text(max_size=20))
def test_no_half_character_is_ever_given_out(text: str) -> None:
    data = text.encode()
    detokenizer = Detokenizer(lambda byte: bytes([byte]))
    for byte in data:
        piece = detokenizer.push([byte])
        assert len(piece) <= 1
        assert "�" not in piece or "�" in text
    assert detokenizer.flush() == ""


def test_an_incomplete_end_is_one_replacement_character() -> None:
    detokenizer = Detokenizer(lambda byte: bytes([byte]))
    assert detokenizer.push(list("ok🙂".encode()[:-1])) == "ok"
    assert detokenizer.flush() == "�"
    assert detokenizer.flush() == ""


@given(
    token_ids=token_lists,
    places=st.lists(st.integers(0, 30)),
    stops=st.lists(st.text(alphabet="abé🙂日�", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stops_do_not_depend_on_the_cut(token_ids: list[int], places: list[int], stops: list[str]) -> None:
    def run(parts: list[list[int]]) -> tuple[str, int | None]:
        sequence = SequenceText(_PIECES.__getitem__, stops=StopStrings(stops))
        text = "".join(sequence.push(part) for part in parts) + sequence.close()
        return text, sequence.stop_position

    text, position = run(cut(token_ids, places))
    assert (text, position) == run([[token_id] for token_id in token_ids])
    assert whole(token_ids).startswith(text)
    if position is None:
        assert text == whole(token_ids)
        assert not any(stop in text for stop in stops)
    else:
        upto = whole(token_ids[:position])
        assert any(upto[len(text) :].startswith(stop) for stop in stops)
        # One token less did not hold the stop yet, unless it ended in half a character.
        before = Detokenizer(_PIECES.__getitem__).push(token_ids[: position - 1])
        assert not any(stop in before for stop in stops)


@given(
    token_ids=token_lists,
    places=st.lists(st.integers(0, 30)),
    stops=st.lists(st.text(alphabet="abé🙂日�", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 12),
)
def test_a_stop_counts_after_min_tokens_and_can_be_shown(
    token_ids: list[int], places: list[int], stops: list[str], min_tokens: int
) -> None:
    def run(*, include_stop: bool) -> tuple[str, SequenceText]:
        sequence = SequenceText(
            _PIECES.__getitem__, stops=StopStrings(stops), include_stop=include_stop, min_tokens=min_tokens
        )
        return "".join(map(sequence.push, cut(token_ids, places))) + sequence.close(), sequence

    without, plain = run(include_stop=False)
    text, shown = run(include_stop=True)
    assert (plain.stop_position, plain.stop_string) == (shown.stop_position, shown.stop_string)
    assert text == without + (plain.stop_string or "")
    assert whole(token_ids).startswith(text)
    # By definition: the first text of more than min_tokens tokens within whose last piece a stop string ends.
    expected = None
    for position in range(1, len(token_ids) + 1):
        detokenizer = Detokenizer(_PIECES.__getitem__)
        before = detokenizer.push(token_ids[: position - 1])
        now = before + detokenizer.push(token_ids[position - 1 : position])
        if position == len(token_ids):
            now += detokenizer.flush()
        ends = [end for end in range(len(before) + 1, len(now) + 1) if now[:end].endswith(tuple(stops))]
        if position > min_tokens and ends:
            expected = (position, now[: ends[0]])
            break
    if expected is None:
        assert shown.stop_position is None
        assert text == whole(token_ids)
    else:
        assert (shown.stop_position, text) == expected


def test_nothing_is_held_back_where_the_stop_is_shown() -> None:
    sequence = SequenceText(lambda byte: bytes([byte]), stops=StopStrings(["abc"]), include_stop=True)
    assert [sequence.push([byte]) for byte in b"xabyabcz"] == ["x", "a", "b", "y", "a", "b", "c", ""]
    assert (sequence.stop_position, sequence.stop_string, sequence.close()) == (7, "abc", "")


def test_position_counts_the_token_that_completes_the_stop() -> None:
    sequence = SequenceText(lambda byte: bytes([byte]), stops=StopStrings(["lo w"]))
    assert sequence.push(list(b"hel")) == "he"
    assert sequence.push(list(b"lo world")) == "l"
    assert (sequence.stop_position, sequence.num_tokens) == (7, 7)
    assert sequence.push(list(b" and more")) == ""
    assert sequence.close() == ""


def test_end_tokens_count_but_give_no_text() -> None:
    sequence = SequenceText(lambda token_id: b"x", end_token_ids=frozenset({9}))
    assert sequence.push([1, 2, 9]) == "xx"
    assert sequence.num_tokens == 3


def test_held_text_comes_out_at_the_end() -> None:
    sequence = SequenceText(lambda byte: bytes([byte]), stops=StopStrings(["abc"]))
    assert sequence.push(list(b"xab")) == "x"
    assert sequence.close() == "ab"
    assert sequence.stop_position is None
