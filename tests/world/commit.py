"""Which version of the code is running."""

from __future__ import annotations

import subprocess

from tests.layout import ROOT


class Commit:
    """The commit that is checked out. has_changes: whether any module differs from it."""

    def __init__(self) -> None:
        self.name = _git("rev-parse", "--short", "HEAD")
        self.has_changes = bool(_git("status", "--porcelain", "--", "*.py"))

    def __str__(self) -> str:
        return f"{self.name}, with changes that are not committed" if self.has_changes else self.name

    @property
    def why_not_added(self) -> str:
        """Why results of this code cannot be added; empty if they can."""
        if self.has_changes:
            return "only what runs at a commit can be added to the results: commit your changes first"
        return ""


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
