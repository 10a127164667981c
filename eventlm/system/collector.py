"""What Python's garbage collector goes through."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def lasting_objects() -> Iterator[None]:
    """Disable the collector inside; freeze what exists at the end.

    For imports. A large library makes hundreds of thousands of objects, and a fifth of the time that torch takes to
    load went into looking for garbage among them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
