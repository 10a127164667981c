"""What every launcher has."""

from __future__ import annotations

import pytest

from eventlm.launchers.launcher import Launcher, LaunchError
from eventlm.system.system import real_system


async def test_a_launcher_must_say_how_it_starts() -> None:
    assert not Launcher.is_local
    with pytest.raises(NotImplementedError):
        await Launcher().start(real_system(), [])


def test_an_error_may_be_for_now_only() -> None:
    assert not LaunchError("no such node").waits_for_room
    error = LaunchError("no room", waits_for_room=True)
    assert (str(error), error.waits_for_room) == ("no room", True)
