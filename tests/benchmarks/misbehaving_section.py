"""A section of `benchmarks/gpu.py` whose parts go wrong in all ways."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial

from benchmarks.gpu_harness.row import Context, Parts, Row, SectionError, Skip, check, speed


def parts(context: Context) -> Parts:
    """In between are some that are well."""
    return {
        "first": _well,
        "error": _error,
        "section error": _section_error,
        "skip": _skip,
        "lost": partial(_lose_device, "CUDA error: an illegal memory access was encountered"),
        "lost by Triton": partial(_lose_device, "Triton Error [CUDA]: an illegal memory access was encountered"),
        "second": _well,
        "crash": _crash,
        "hang": _hang,
        "wrong": _wrong,
    }


_is_lost = False


def _well() -> Iterator[Row]:
    assert not _is_lost
    yield speed("well", 1, "GB/s", limit=2, limit_name="peer", target=0.9)


def _error() -> Iterator[Row]:
    yield speed("before the error", 1, "GB/s")
    raise ValueError("so\nit goes")


def _section_error() -> Iterator[Row]:
    yield from ()
    raise SectionError("no ground")


def _skip() -> Iterator[Row]:
    yield from ()
    raise Skip("no tool")


def _lose_device(message: str) -> Iterator[Row]:
    """What comes behind it in the same process fails, too."""
    yield from ()
    global _is_lost
    _is_lost = True
    raise RuntimeError(message)


def _crash() -> Iterator[Row]:
    yield from ()
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang() -> Iterator[Row]:
    yield from ()
    time.sleep(1000)


def _wrong() -> Iterator[Row]:
    yield check("wrong", float("nan"), "", at_most=0.1)
