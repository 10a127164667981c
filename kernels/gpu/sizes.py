"""Sizes of grids and tiles, in plain Python: a call of Triton's own functions for them takes microseconds."""

from __future__ import annotations


def ceil_div(number: int, divisor: int) -> int:
    """The quotient of two positive numbers, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below a number of at least 1."""
    return 1 << (number - 1).bit_length()
