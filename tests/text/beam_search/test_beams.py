"""The beams of a search against one that looks at every sequence, and against small ones by hand."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from eventlm.sampling_params import TokenLogprobs
from eventlm.text.beam_search.beams import Beams, Top

#: Log-probabilities of the next token after these.
Model = dict[tuple[int, ...], list[float]]


def random_model(rng: random.Random, *, vocab_size: int, max_tokens: int) -> Model:
    model: Model = {}
    for length in range(max_tokens):
        for tokens in itertools.product(range(vocab_size), repeat=length):
            weights = [rng.random() ** 3 for _ in range(vocab_size)]
            model[tokens] = [math.log(weight / sum(weights)) for weight in weights]
    return model


def top(model: Model, tokens: list[int], num: int) -> Top:
    ranked = sorted(enumerate(model[tuple(tokens)]), key=lambda each: -each[1])[:num]
    return Top([token for token, _ in ranked], [logprob for _, logprob in ranked])


def search(model: Model, beams: Beams) -> tuple[list[tuple[list[int], float]], int]:
    """What is found, best first, and in how many steps."""
    num_steps = 0
    while not beams.is_over:
        beams.advance([top(model, beam.token_ids(), max(beams.num_candidates, 2)) for beam in beams.live])
        num_steps += 1
    return [(each.beam.token_ids(), each.score) for each in beams.complete], num_steps


def all_sequences(
    model: Model, *, vocab_size: int, max_tokens: int, ends: frozenset[int], min_tokens: int, penalty: float
) -> list[tuple[list[int], float]]:
    """Every complete sequence with its score, best first."""
    found: list[tuple[list[int], float]] = []

    def visit(tokens: list[int], total: float) -> None:
        if tokens and (tokens[-1] in ends or len(tokens) == max_tokens):
            found.append((tokens, total / len(tokens) ** penalty))
            return
        for token in range(vocab_size):
            if token not in ends or len(tokens) >= min_tokens:
                visit([*tokens, token], total + model[tuple(tokens)][token])

    visit([], 0.0)
    return sorted(found, key=lambda each: -each[1])


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("min_tokens", [0, 2])
def test_a_search_that_is_wide_enough_finds_the_best_of_all_sequences(penalty: float, min_tokens: int) -> None:
    vocab_size, max_tokens, ends = 4, 4, frozenset({0})
    model = random_model(random.Random(7), vocab_size=vocab_size, max_tokens=max_tokens)
    settings = {"max_tokens": max_tokens, "ends": ends, "min_tokens": min_tokens}
    expected = all_sequences(model, vocab_size=vocab_size, penalty=penalty, **settings)  # type: ignore[arg-type]
    width = vocab_size**max_tokens
    found, _ = search(model, Beams(width=width, length_penalty=penalty, **settings))  # type: ignore[arg-type]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected])


def chances(*values: float) -> list[float]:
    return [math.log(value) for value in values]


#: Token 0 ends. The likeliest first token leads to the worse sequences.
GARDEN: Model = {
    (): chances(0.2, 0.5, 0.3),
    (1,): chances(0.3, 0.36, 0.34),
    (2,): chances(0.9, 0.06, 0.04),
    (1, 1): chances(0.4, 0.3, 0.3),
    (1, 2): chances(0.4, 0.3, 0.3),
    (2, 1): chances(0.4, 0.3, 0.3),
    (2, 2): chances(0.4, 0.3, 0.3),
}


def test_two_beams_by_hand() -> None:
    found, _ = search(GARDEN, Beams(width=2, length_penalty=0.0, max_tokens=3, ends=frozenset({0})))
    # Of the first step's three, the end has rank 3 and does not count. (2, 0) beats all that begin with 1.
    assert [tokens for tokens, _ in found] == [[2, 0], [1, 1, 0]]
    assert [score for _, score in found] == pytest.approx([math.log(0.27), math.log(0.072)])


def test_a_penalty_prefers_long_ones() -> None:
    found, _ = search(GARDEN, Beams(width=2, length_penalty=5.0, max_tokens=3, ends=frozenset({0})))
    assert [len(tokens) for tokens, _ in found] == [3, 3]


def test_it_stops_when_nothing_better_can_come() -> None:
    # After "0" and "1 0" every other sequence is worse, whatever follows.
    model = {tokens: chances(0.98, 0.015, 0.005) for n in range(6) for tokens in itertools.product((0, 1, 2), repeat=n)}
    beams = Beams(width=2, length_penalty=0.0, max_tokens=6, ends=frozenset({0}))
    found, num_steps = search(model, beams)
    assert ([tokens for tokens, _ in found], num_steps) == ([[0], [1, 0]], 2)


def test_logprobs_of_a_beam() -> None:
    beams = Beams(width=1, length_penalty=1.0, max_tokens=2, num_top=2)
    search(GARDEN, beams)
    [(_, beam, ends)] = beams.complete
    assert not ends
    assert beam.token_ids() == [1, 1]
    assert beam.token_logprobs() == TokenLogprobs(
        logprobs=chances(0.5, 0.36),
        ranks=[1, 1],
        top_ids=[[1, 2], [1, 2]],
        top_logprobs=[chances(0.5, 0.3), chances(0.36, 0.34)],
    )
    assert beam.total == pytest.approx(math.log(0.18))


def test_of_equals_the_better_beams_child_comes_first() -> None:
    model = {tokens: chances(0.5, 0.5) for n in range(3) for tokens in itertools.product((0, 1), repeat=n)}
    found, _ = search(model, Beams(width=2, length_penalty=1.0, max_tokens=3))
    assert [tokens for tokens, _ in found] == [[0, 0, 0], [0, 0, 1]]
