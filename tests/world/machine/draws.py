"""Random draws keyed by name, so that leaving one out does not change any other."""

from __future__ import annotations

import xxhash

from eventlm.system.chance import Chance

MILLION = 1_000_000


class Draws:
    """The draws of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.num_drawn = 0
        #: How many draws were made so far under each name, for `next`.
        self._numbers: dict[str, int] = {}

    def draw(self, what: str, *numbers: int) -> int:
        """64 random bits, always the same for the same name and numbers."""
        self.num_drawn += 1
        return xxhash.xxh3_64_intdigest(f"{self.seed}/{what}/{'/'.join(map(str, numbers))}".encode())

    def next(self, what: str) -> int:
        """64 random bits that differ on each call."""
        number = self._numbers[what] = self._numbers.get(what, 0) + 1
        return self.draw(what, number)

    def happens(self, ppm: int, what: str, *numbers: int) -> bool:
        """Whether something that happens `ppm` times in a million happens here."""
        return ppm > 0 and self.draw(what, *numbers) % MILLION < ppm

    def between(self, least: int, most: int, what: str, *numbers: int) -> int:
        """A random integer from `least` to `most`, both included."""
        return least + self.draw(what, *numbers) % (most - least + 1)


class DrawnChance(Chance):
    """A process's source of ids and keys. name: the name of the process."""

    def __init__(self, draws: Draws, name: str) -> None:
        self._draws = draws
        self._name = name

    def token_bytes(self, num_bytes: int) -> bytes:
        """As Chance.token_bytes."""
        words = [self._draws.next(f"bytes of {self._name}").to_bytes(8) for _ in range(0, num_bytes, 8)]
        return b"".join(words)[:num_bytes]

    def identity(self, prefix: str) -> str:
        """As Chance.identity."""
        return f"{prefix}{self.token_bytes(16).hex()}"
