"""Mistakes of those who call the offline API."""

from __future__ import annotations

from eventlm.errors import InputError


class InvalidInputError(InputError):
    """An argument makes no sense; the message names it."""

    def __init__(self, message: str) -> None:
        super().__init__(None, message)
