"""The compiled forward pass for CPUs: which build of it this machine can run, and its functions.

`make install` compiles one source several times, each for the instructions of one kind of processor; without a
compiler none is there. A build is a plain shared library, called through ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

#: Builds, the fastest first, with what a processor must be able to do for each (names of /proc/cpuinfo).
BUILDS: dict[str, frozenset[str]] = {
    "amx": frozenset(
        {"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512vl", "avx512bw", "avx512dq"}
    ),
    "avx512": frozenset({"avx512_bf16", "avx512_vnni", "avx512vl", "avx512bw", "avx512dq"}),
    "avx2": frozenset({"avx2", "fma"}),
    "baseline": frozenset(),
}
#: Tokens of a sub-block of the cache; a block holds whole ones.
SUB_BLOCK = 16
#: What the functions take and give, by number: kInterface of api.cpp, which says when it is raised.
_INTERFACE = 3
_LANES = 16
_MAX_HEAD_DIM = 256
_MAX_GROUP = 32


class NativeShape(ctypes.Structure):
    """A decoder's shape, as weights.h has it. `is_tied`: whether the embedding is the output matrix, 0 or 1."""

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


def unsupported(shape: NativeShape, block_size: int) -> str:
    """Why the compiled decoder cannot run a model of this shape; empty if it can."""
    group = shape.num_heads // shape.num_kv_heads
    if shape.head_dim % _LANES or shape.head_dim > _MAX_HEAD_DIM:
        return f"heads of {shape.head_dim} are not a multiple of {_LANES} up to {_MAX_HEAD_DIM}"
    if shape.hidden_size % _LANES:
        return f"a hidden size of {shape.hidden_size} is not a multiple of {_LANES}"
    if group > _MAX_GROUP:
        return f"{group} query heads share a key"
    if block_size % SUB_BLOCK:
        return f"blocks of {block_size} tokens are not a multiple of {SUB_BLOCK}"
    return ""


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


def library_hash(build: str) -> str:
    """16 hex digits for a build that is available: other sources, flags or another compiler give others."""
    return hashlib.blake2b(_path(build).read_bytes(), digest_size=8).hexdigest()


def _path(build: str) -> Path:
    return Path(__file__).with_name(f"{build}.abi3.so")


def _raise_if_no_memory(status: int) -> None:
    if status:
        raise MemoryError


@functools.cache
def _library(build: str) -> ctypes.CDLL | None:
    """None if the build was not compiled, is for another machine or of other sources than this file, or if the system
    keeps its instructions from processes."""
    try:
        functions = ctypes.CDLL(str(_path(build)))
        if functions.eventlm_interface() != _INTERFACE:
            return None
        _declare(functions)
    except (OSError, AttributeError):
        # An AttributeError is a function that older sources did not have.
        return None
    return functions if functions.eventlm_prepare() == 0 else None


def _declare(functions: ctypes.CDLL) -> None:
    """Say what the functions take and give. Raises AttributeError if one is not there."""
    functions.eventlm_decoder.restype = c_void_p
    functions.eventlm_decoder.argtypes = (POINTER(NativeShape), c_void_p, c_void_p, c_int32, c_int32)
    functions.eventlm_free.restype = None
    functions.eventlm_free.argtypes = (c_void_p,)
    functions.eventlm_set_embedding.restype = None
    functions.eventlm_set_embedding.argtypes = (c_void_p, c_void_p)
    functions.eventlm_load_matrix.restype = _raise_if_no_memory
    functions.eventlm_load_matrix.argtypes = (c_void_p, c_int32, c_int32, c_void_p, c_int64, c_int64)
    functions.eventlm_load_vector.restype = _raise_if_no_memory
    functions.eventlm_load_vector.argtypes = (c_void_p, c_int32, c_int32, c_void_p)
    functions.eventlm_pin.restype = None
    functions.eventlm_pin.argtypes = (c_void_p, c_void_p)
    functions.eventlm_forward.restype = _raise_if_no_memory
    functions.eventlm_forward.argtypes = (
        *(c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p),
        *(c_void_p, c_int32, c_int32, c_int32, c_void_p),
    )
    functions.eventlm_norm.restype = None
    functions.eventlm_norm.argtypes = (c_void_p, c_void_p, c_int32, c_void_p)
    functions.eventlm_logits.restype = _raise_if_no_memory
    functions.eventlm_logits.argtypes = (c_void_p, c_void_p, c_int32, c_void_p)
    functions.eventlm_draw.restype = _raise_if_no_memory
    functions.eventlm_draw.argtypes = (c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p)
    functions.eventlm_draw_next.restype = _raise_if_no_memory
    functions.eventlm_draw_next.argtypes = (c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p)
    functions.eventlm_times.restype = POINTER(c_int64)
    functions.eventlm_times.argtypes = (c_void_p,)
