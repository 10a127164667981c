"""Named random streams: everything that a load test draws follows from one seed and the names of what is drawn.

A stream does not depend on how much was drawn from the others, so that a longer run begins like a shorter one, and a
change of the arrivals leaves the prompts as they are.
"""

from __future__ import annotations

import zlib

import numpy


def random_stream(seed: int, *name: str | int) -> numpy.random.Generator:
    """The stream of `name` under `seed`."""
    path = [part if isinstance(part, int) else zlib.crc32(part.encode()) for part in name]
    return numpy.random.Generator(numpy.random.PCG64(numpy.random.SeedSequence(seed, spawn_key=path)))
