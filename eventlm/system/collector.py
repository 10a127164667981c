"""What Python's garbage collector goes through."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def lasting_objects() -> Iterator[None]:
    """What is there at the end stays: the collector goes through none of it, neither meanwhile nor later.

    For imports. A large library makes hundreds of thousands of objects, and a fifth of the time that torch takes to
    load went into looking for garbage among them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
