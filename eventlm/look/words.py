"""Figures as people read them."""

from __future__ import annotations

from eventlm.types import NANOSECONDS_PER_MILLISECOND, NANOSECONDS_PER_SECOND


def percent(ppm: int) -> str:
    """`12%`, `0.4%`."""
    value = ppm / 10_000
    return f"{value:.0f}%" if value >= 10 or value == 0 else f"{value:.1f}%"


def seconds(ns: int) -> str:
    """`1.2 s`, `35 ms`, `1,234 s`."""
    if abs(ns) < NANOSECONDS_PER_SECOND:
        return f"{ns / NANOSECONDS_PER_MILLISECOND:.3g} ms"
    value = ns / NANOSECONDS_PER_SECOND
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"
