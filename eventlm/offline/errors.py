"""Mistakes of those who call the offline API."""

from __future__ import annotations

from eventlm.errors import UsageError


class InvalidInputError(UsageError, ValueError):
    """An argument makes no sense. It is a ValueError too, as callers of such libraries expect."""
