"""A process that dies at a chosen place, as far as the disk can tell."""

from __future__ import annotations

import os
from typing import Any

import pytest


class Killed(BaseException):
    """The process is gone."""


def die_at(patch: pytest.MonkeyPatch, fail_at: int) -> list[str]:
    """Have the process die before its `fail_at`-th change of the disk from now on, in the middle of a write."""
    calls: list[str] = []

    def dying(name: str) -> Any:
        real = getattr(os, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            if len(calls) == fail_at:
                if name == "write":
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                raise Killed
            calls.append(name)
            return real(*arguments, **keywords)

        return call

    for name in ("open", "write", "link", "rename", "close", "unlink", "ftruncate"):
        patch.setattr(os, name, dying(name))
    return calls
