from __future__ import annotations

from eventlm.kernels.gpu.sizes import ceil_div, next_power_of_2


def test_quotients_rounded_up() -> None:
    assert [ceil_div(number, 4) for number in range(1, 10)] == [1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_powers_of_two() -> None:
    assert [next_power_of_2(number) for number in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert next_power_of_2((1 << 20) + 1) == 1 << 21
