"""Where eventlm keeps what it makes for a user and should survive a reboot: histories, traces."""

from __future__ import annotations

import os
from pathlib import Path

#: Where runs are recorded to, instead of the state folder.
RUNS_VARIABLE = "EVENTLM_STATE"


def runs_folder() -> Path:
    """`$EVENTLM_STATE`, else `runs` in the state folder: where servers record to by themselves."""
    chosen = os.environ.get(RUNS_VARIABLE)
    return Path(chosen) if chosen else state_folder() / "runs"


def state_folder() -> Path:
    """`$XDG_STATE_HOME/eventlm`, else `~/.local/state/eventlm`; absolute, need not exist."""
    xdg = Path(os.environ.get("XDG_STATE_HOME", ""))
    # The XDG specification has relative paths ignored.
    return (xdg if xdg.is_absolute() else Path.home() / ".local" / "state") / "eventlm"
