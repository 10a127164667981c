"""The compiled forward pass for CPUs: which build of it this machine can run, and its functions.

`make install` compiles one source several times, each for the instructions of one kind of processor; without a
compiler none is there. A build is a plain shared library, called through ctypes.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

#: Builds, the fastest first, with what a processor must be able to do for each (names of /proc/cpuinfo).
BUILDS: dict[str, frozenset[str]] = {
    "amx": frozenset({"amx_tile", "amx_bf16", "avx512_bf16", "avx512vl", "avx512bw", "avx512dq"}),
    "avx512": frozenset({"avx512_bf16", "avx512vl", "avx512bw", "avx512dq"}),
    "avx2": frozenset({"avx2", "fma"}),
    "baseline": frozenset(),
}


class NativeShape(ctypes.Structure):
    """A decoder's shape, as decoder.h has it. `is_tied`: whether the embedding is the output matrix, 0 or 1."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in (
                "vocab_size",
                "hidden_size",
                "intermediate_size",
                "num_layers",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "max_positions",
                "is_tied",
            )
        ),
        ("eps", c_float),
    )


@functools.cache
def processor_flags() -> frozenset[str]:
    """What this machine's processor can do, in the words of /proc/cpuinfo; nothing where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def available_builds() -> list[str]:
    """Builds that are compiled and that this machine can run, the fastest first."""
    return [name for name in BUILDS if BUILDS[name] <= processor_flags() and _library(name) is not None]


def library(build: str) -> ctypes.CDLL:
    """The functions of a build that is available."""
    found = _library(build)
    if found is None:
        raise LookupError(build)
    return found


@functools.cache
def _library(build: str) -> ctypes.CDLL | None:
    """None if it was not compiled or is for another machine, or the system keeps its instructions from processes."""
    try:
        functions = ctypes.CDLL(str(Path(__file__).with_name(f"{build}.abi3.so")))
    except OSError:
        return None
    functions.eventlm_decoder.restype = c_void_p
    functions.eventlm_decoder.argtypes = (POINTER(NativeShape), c_void_p, c_void_p, c_int32)
    functions.eventlm_free.restype = None
    functions.eventlm_free.argtypes = (c_void_p,)
    for load in (functions.eventlm_load_matrix, functions.eventlm_load_vector):
        load.restype = None
        load.argtypes = (c_void_p, c_int32, c_int32, c_void_p)
    functions.eventlm_forward.restype = None
    functions.eventlm_forward.argtypes = (
        *(c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p),
        *(c_void_p, c_int32, c_int32, c_void_p),
    )
    functions.eventlm_norm.restype = None
    functions.eventlm_norm.argtypes = (c_void_p, c_void_p, c_int32, c_void_p)
    functions.eventlm_logits.restype = None
    functions.eventlm_logits.argtypes = (c_void_p, c_void_p, c_int32, c_void_p)
    functions.eventlm_draw.restype = None
    functions.eventlm_draw.argtypes = (c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p)
    functions.eventlm_times.restype = POINTER(c_int64)
    functions.eventlm_times.argtypes = (c_void_p,)
    return functions if functions.eventlm_prepare() == 0 else None
