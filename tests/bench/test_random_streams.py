"""Streams by name."""

from __future__ import annotations

from eventlm.bench.random_streams import random_stream


def draw(seed: int, *name: str | int) -> list[int]:
    return [int(value) for value in random_stream(seed, *name).integers(2**60, size=4)]


def test_a_stream_follows_from_seed_and_name() -> None:
    assert draw(7, "prompt", 3) == draw(7, "prompt", 3)


def test_seeds_and_names_make_different_streams() -> None:
    streams = [draw(0, "a"), draw(1, "a"), draw(0, "b"), draw(0, "a", 0), draw(0, "a", 1), draw(0, "a", "1")]
    assert len({tuple(stream) for stream in streams}) == len(streams)


def test_a_seed_means_the_same_tomorrow() -> None:
    """A load that is named by its seed can be put on another server, by another version."""
    assert draw(0, "arrivals")[:2] == [503191758321155395, 8278814634541808]
