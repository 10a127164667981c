"""Tokens of the fake worker: words of valid UTF-8, drawn by seed, index and position alone."""

from __future__ import annotations

import pytest

from eventlm.worker.fake.tokens import (
    FIRST_PIECE_ID,
    MILLION,
    NUM_PIECES,
    POISONED_PLACES,
    WORD_BYTES,
    WORDS,
    FakeParameters,
    draw,
    fake_token,
    poisoned_place,
)


def test_samples_and_seeds_differ() -> None:
    def text(seed: int, index: int) -> bytes:
        return bytes(fake_token(seed, index, position) for position in range(4 * WORD_BYTES))

    texts = [text(seed, index) for seed in range(4) for index in range(2)]
    assert len(set(texts)) == 8
    for each in texts:
        assert [each[at : at + WORD_BYTES] in WORDS for at in range(0, len(each), WORD_BYTES)] == [True] * 4
        each.decode()
    assert all(len(word) == WORD_BYTES for word in WORDS)


def test_pieces_come_as_often_as_asked_for() -> None:
    tokens = [fake_token(1, 0, position, piece_ppm=MILLION // 2) for position in range(2_000)]
    pieces = [token for token in tokens if token >= FIRST_PIECE_ID]
    assert max(pieces) < FIRST_PIECE_ID + NUM_PIECES
    assert len(pieces) == pytest.approx(1_000, rel=0.1)
    assert [fake_token(1, 0, position) >= FIRST_PIECE_ID for position in range(2_000)] == [False] * 2_000


def test_a_poisoned_sequence_has_one_place_and_others_none() -> None:
    indices = [poisoned_place(FakeParameters(poison_ppm=MILLION), seed, 0) for seed in range(200)]
    assert set(indices) == set(range(POISONED_PLACES))
    assert poisoned_place(FakeParameters(), 1, 0) is None


def test_a_draw_depends_on_all_that_it_is_made_from() -> None:
    assert draw("end", 1, 2) == draw("end", 1, 2)
    assert len({draw("end", 1, 2), draw("end", 12), draw("end", 2, 1), draw("late", 1, 2)}) == 4
