"""The keys of a GGUF file that describe its model, whose names begin with the architecture."""

from __future__ import annotations

from typing import Any, NoReturn

from gguf.constants import Keys

from eventlm.errors import CheckpointError
from eventlm.models.gguf.header import GgufHeader


class ModelKeys:
    """Reads keys as `gguf.constants.Keys` names them, with `{arch}` for the architecture.

    What a method refuses is a CheckpointError that names the file and the key.
    """

    def __init__(self, header: GgufHeader) -> None:
        self._header, self.path = header, header.path
        self.architecture: str = header.need(Keys.General.ARCHITECTURE, str)

    def name(self, key: str) -> str:
        """As it is in the file."""
        return key.format(arch=self.architecture)

    def raw(self, key: str) -> Any:
        """A value of any kind, None if it is missing."""
        return self._header.metadata.get(self.name(key))

    def get(self, key: str, kind: type[Any], default: Any = None) -> Any:
        """See `GgufHeader.get`."""
        return self._header.get(self.name(key), kind, default)

    def need(self, key: str, kind: type[Any]) -> Any:
        """See `GgufHeader.need`."""
        return self._header.need(self.name(key), kind)

    def size(self, key: str) -> int:
        """A number that must be there and positive."""
        value: int = self.need(key, int)
        if value < 1:
            self.refuse(key, f"is {value}, it must be a positive integer")
        return value

    def count(self, key: str, most: int) -> int:
        """A number from 0 to `most`; 0 if it is missing."""
        value: int = self.get(key, int, 0)
        if not 0 <= value <= most:
            self.refuse(key, f"is {value:,}, it must be from 0 to {most:,}")
        return value

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise the error for a key; `why` follows its name."""
        raise CheckpointError(f"{self.path}: key {self.name(key)} {why}; take another file of the model")
