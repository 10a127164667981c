"""Chance: ids, keys and seeds. What a replay must draw again is drawn from a seed that the trace records."""

from __future__ import annotations

# What `secrets` hands out, too; that loads OpenSSL, which makes every worker larger.
import os
from typing import Protocol


class Chance(Protocol):
    """A source of random bytes."""

    def token_bytes(self, num_bytes: int) -> bytes:
        """Unpredictable bytes, fit for secrets."""
        ...

    def identity(self, prefix: str) -> str:
        """A unique id that begins with `prefix`."""
        ...


class SystemChance:
    """The operating system's own."""

    def token_bytes(self, num_bytes: int) -> bytes:
        """As Chance says."""
        return os.urandom(num_bytes)

    def identity(self, prefix: str) -> str:
        """As Chance says."""
        return f"{prefix}{os.urandom(16).hex()}"
