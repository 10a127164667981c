"""Which of several servers a key belongs to (rendezvous hashing, Thaler and Ravishankar, 1996).

Each pair of a key and a server has a number that looks random, and the key belongs to the server with the largest one.
So where a server goes, only its own keys move, to all others alike; when it is back, so are they.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

_MASK = (1 << 64) - 1
#: Odd numbers whose bits look random (from splitmix64 and xxHash): multiplying by them spreads what differs.
_SPREAD, _MIX = 0x9E3779B97F4A7C15, 0x9FB21C651E98DF25
#: Logarithms are counted in 2^-48.
_FRACTION_BITS = 48
_ONE = 1 << _FRACTION_BITS


def rendezvous(key: int, servers: Seq[int], shares: Seq[int]) -> int:
    """The position of the server to which a key belongs, among some given by their numbers; there is one at least.
    They get keys in proportion to their shares, within a few percent.
    """
    mixed = _mix(key)
    drawn = [_mix(mixed ^ number * _SPREAD) for number in servers]
    if any(share != shares[0] for share in shares):
        # The smallest of exponential variables, whose rates are the shares.
        drawn = [-(64 * _ONE - _log2(each + 1)) // share for each, share in zip(drawn, shares, strict=True)]
    return drawn.index(max(drawn))


def _mix(value: int) -> int:
    value = value * _MIX & _MASK
    return (value ^ (value >> 32)) * _SPREAD & _MASK


def _log2(value: int) -> int:
    """The logarithm of an integer from 1, by parabolas between the powers of two, with an error below 0.01."""
    exponent = value.bit_length() - 1
    x = ((value << _FRACTION_BITS) >> exponent) - _ONE
    return (exponent << _FRACTION_BITS) + x + (x * (_ONE - x) >> _FRACTION_BITS) * 344 // 1000
