"""Where eventlm keeps what should survive a reboot: recorded runs and the history of chats."""

from __future__ import annotations

import os
from pathlib import Path

#: Names the state folder.
STATE_VARIABLE = "EVENTLM_STATE"


def runs_folder() -> Path:
    """`runs` in the state folder: where servers record by default."""
    return state_folder() / "runs"


def state_folder() -> Path:
    """`$EVENTLM_STATE`, else `$XDG_STATE_HOME/eventlm`, else `~/.local/state/eventlm`. It need not exist."""
    if chosen := os.environ.get(STATE_VARIABLE):
        return Path(chosen)
    xdg = Path(os.environ.get("XDG_STATE_HOME", ""))
    # The XDG specification has relative paths ignored.
    return (xdg if xdg.is_absolute() else Path.home() / ".local" / "state") / "eventlm"
