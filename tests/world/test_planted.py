"""The invariants of a world find bugs that are planted in the shell."""

from __future__ import annotations

import pytest

from tests.world.planted import PLANTED, first_found
from tests.world.run import run_plan

#: Bugs that the first seeds find.
_SOON = (
    "effect before its write",
    "old epoch",
    "missing restart",
    "lost text end",
    "two ends",
    "leaked file",
    "resubmission run twice",
    "spool never emptied",
    "stream from its start",
)


def _find(name: str) -> None:
    """Run seeds in order until an invariant fails, which must be one that is about the bug."""
    seed, found = first_found(name)
    assert found in PLANTED[name].found_by
    # Without the bug, the same seed passes.
    run_plan(PLANTED[name].draw(seed))


@pytest.mark.parametrize("name", _SOON)
def test_some_planted_bugs_are_found_at_once(name: str) -> None:
    _find(name)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in PLANTED if name not in _SOON])
def test_every_planted_bug_is_found(name: str) -> None:
    _find(name)
