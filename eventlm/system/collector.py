"""When Python's garbage collector runs, and what it goes through."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Disable the collector inside. For work that makes many objects, and no garbage that refers to itself."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def lasting_objects() -> Iterator[None]:
    """Disable the collector inside; freeze what exists at the end.

    For imports. A large library makes hundreds of thousands of objects, and a fifth of the time that torch takes to
    load went into looking for garbage among them.
    """
    with collector_off():
        try:
            yield
        finally:
            gc.freeze()
