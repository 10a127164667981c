"""Every test here must leave no process and no folder behind."""

from __future__ import annotations

from tests.engine.conftest import nothing_left_behind

__all__ = ["nothing_left_behind"]
