"""Chance: ids, keys and seeds. What a replay must draw again is drawn from a seed that the trace records."""

from __future__ import annotations

import secrets
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
        return secrets.token_bytes(num_bytes)

    def identity(self, prefix: str) -> str:
        """As Chance says."""
        return f"{prefix}{secrets.token_hex(16)}"
