"""Chance, keyed: each draw is named, so that leaving one out moves no other."""

from __future__ import annotations

import xxhash

from eventlm.system.chance import Chance

MILLION = 1_000_000


class Draws:
    """The draws of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.num_drawn = 0
        #: Of the draws that are numbered by themselves.
        self._numbers: dict[str, int] = {}

    def draw(self, what: str, *numbers: int) -> int:
        """64 bits, always the same for these numbers."""
        self.num_drawn += 1
        return xxhash.xxh3_64_intdigest(f"{self.seed}/{what}/{'/'.join(map(str, numbers))}".encode())

    def next(self, what: str) -> int:
        """64 bits, others each time."""
        number = self._numbers[what] = self._numbers.get(what, 0) + 1
        return self.draw(what, number)

    def happens(self, ppm: int, what: str, *numbers: int) -> bool:
        """Whether something happens that does so `ppm` times in a million."""
        return ppm > 0 and self.draw(what, *numbers) % MILLION < ppm

    def between(self, least: int, most: int, what: str, *numbers: int) -> int:
        """An integer, both ends included."""
        return least + self.draw(what, *numbers) % (most - least + 1)


class DrawnChance(Chance):
    """A process's source of ids and keys. name: of the process."""

    def __init__(self, draws: Draws, name: str) -> None:
        self._draws = draws
        self._name = name

    def token_bytes(self, num_bytes: int) -> bytes:
        """As Chance says."""
        words = [self._draws.next(f"bytes of {self._name}").to_bytes(8) for _ in range(0, num_bytes, 8)]
        return b"".join(words)[:num_bytes]

    def identity(self, prefix: str) -> str:
        """As Chance says."""
        return f"{prefix}{self.token_bytes(16).hex()}"
