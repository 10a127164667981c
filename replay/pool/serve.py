"""The child's side of a pool: specifications as JSON, a line each, in; results, a line each, out."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Struct

Spec = TypeVar("Spec", bound=Struct)


def serve(run: Callable[[Spec], Struct], spec_type: type[Spec]) -> None:
    """Run what comes until the input ends."""
    # Ctrl-C is for the parent process. The output of plug-ins must not mix with the results.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(1), "wb") as results:
        os.dup2(2, 1)
        for line in sys.stdin.buffer:
            result = run(msgspec.json.decode(line, type=spec_type))
            results.write(msgspec.json.encode(result) + b"\n")
            results.flush()
