"""Where eventlm keeps what it makes for a user and should survive a reboot: histories, traces."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """`$XDG_STATE_HOME/eventlm`, else `~/.local/state/eventlm`; absolute, need not exist."""
    xdg = Path(os.environ.get("XDG_STATE_HOME", ""))
    # The XDG specification has relative paths ignored.
    return (xdg if xdg.is_absolute() else Path.home() / ".local" / "state") / "eventlm"
