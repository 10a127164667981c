"""Where models, and what is made of them, are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`EVENTLM_HOME`, else `$XDG_CACHE_HOME/eventlm`, else `~/.cache/eventlm`; absolute, need not exist."""
    if home := os.environ.get("EVENTLM_HOME"):
        return Path(home).expanduser().absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification has relative paths ignored.
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "eventlm"
