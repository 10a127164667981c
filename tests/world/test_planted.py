"""Bugs that are planted in the shell are found by the invariants of a world."""

from __future__ import annotations

import pytest

from tests.world.planted import PLANTED
from tests.world.run import run_plan

#: Those that the first seeds find, and by how many.
_SOON = ("effect before its write", "old epoch", "lost text end", "dropped cancel")
_FEW, _MANY = 12, 200


def _find(name: str, most: int) -> None:
    """Run seeds in order until an invariant fails, which must be one that is about the bug."""
    planted = PLANTED[name]
    for seed in range(most):
        found = planted.find(seed)
        if found:
            print(f"{name}: seed {seed}, by {found!r}")
            assert found in planted.found_by
            # And not without the bug.
            run_plan(planted.draw(seed))
            return
    pytest.fail(f"{most} seeds do not find the bug: {planted.what}")


@pytest.mark.parametrize("name", _SOON)
def test_some_planted_bugs_are_found_at_once(name: str) -> None:
    _find(name, _FEW)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in PLANTED if name not in _SOON])
def test_every_planted_bug_is_found(name: str) -> None:
    _find(name, _MANY)
