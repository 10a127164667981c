"""Figures as people read them."""

from __future__ import annotations

from eventlm.look.words import percent, seconds


def test_figures() -> None:
    assert [percent(ppm) for ppm in (0, 4_000, 123_456, 1_000_000)] == ["0%", "0.4%", "12%", "100%"]
    assert [seconds(ns) for ns in (35_000_000, 1_234_000_000, 1_234_000_000_000)] == ["35 ms", "1.23 s", "1,234 s"]
