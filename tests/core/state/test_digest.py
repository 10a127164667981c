from __future__ import annotations

from itertools import pairwise

from eventlm.core.state.digest import MASK, combine, to_hex, weight


def test_weights_are_those_of_splitmix64() -> None:
    # The first outputs of the generator with seed 0 (Steele et al.'s reference implementation).
    gamma = 0x9E3779B97F4A7C15
    assert [weight(index * gamma & MASK) for index in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_weights_of_neighbours_share_no_pattern() -> None:
    weights = [weight(value) for value in range(-500, 500)]
    assert all(0 <= each <= MASK for each in weights)
    assert len(set(weights)) == 1000
    differing = [(one ^ other).bit_count() for one, other in pairwise(weights)]
    assert 30 < sum(differing) / len(differing) < 34


def test_a_combination_knows_its_order_and_its_ends() -> None:
    combinations = [(1, 2), (2, 1), (12,), (1, 2, 0), (), ("a", 1), ("a1",)]
    assert len({combine(values) for values in combinations}) == len(combinations)
    assert combine([1, "x"]) == combine(("1", "x"))
    assert 0 <= combine(["eventlm"]) <= MASK


def test_hex_has_16_digits_of_the_low_64_bits() -> None:
    assert to_hex(0) == "0" * 16
    assert to_hex(0xAB) == "00000000000000ab"
    assert to_hex((5 << 64) + 1) == "0000000000000001"
    assert to_hex(-1) == "f" * 16
