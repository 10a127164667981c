"""Digests of the state, kept as sums of 64-bit weights so that a change costs one addition.

A sum does not depend on the order of its terms, hence not on that of any dictionary or set.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

MASK = (1 << 64) - 1


def weight(value: int) -> int:
    """A pseudo-random 64-bit number for an integer: the finaliser of splitmix64 (Steele et al., OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def combine(values: Iterable[object]) -> int:
    """A 64-bit hash of integers and strings in their order."""
    return xxhash.xxh3_64_intdigest("|".join(map(str, values)).encode())


def to_hex(digest: int) -> str:
    """16 hex digits of the low 64 bits."""
    return f"{digest & MASK:016x}"
