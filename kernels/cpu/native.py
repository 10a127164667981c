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
from typing import NamedTuple

#: Builds, the fastest first, with what a processor must be able to do for each (names of /proc/cpuinfo).
BUILDS: dict[str, frozenset[str]] = {
    "amx": frozenset(
        {"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512vl", "avx512bw", "avx512dq"}
    ),
    "avx512": frozenset({"avx512_bf16", "avx512_vnni", "avx512vl", "avx512bw", "avx512dq"}),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "baseline": frozenset(),
}
#: Tokens of a sub-block of the cache; a block holds whole ones.
SUB_BLOCK = 16
#: What the functions take and give, by number: kInterface of api.cpp, which says when it is raised.
_INTERFACE = 15
_LANES = 16
#: Outputs of a panel: packed.h's kPanel.
PANEL = 32
_MAX_HEAD_DIM = 512
_MAX_GROUP = 32
#: Of a convolution; and a multiple of what it must have, as the value heads of the delta rule.
_MAX_TAPS, _CHANNELS = 8, 32

#: In the order of program.h's Weight. All but an embedding, the norms of queries and keys, sinks, correction,
#: shared_scale, output_gate, and what only layers with inputs and the delta rule have, may have a bias.
WEIGHTS = (
    *("embedding", "lm_head", "final_norm"),
    *("attention_norm", "attention_out_norm", "feed_forward_norm", "feed_forward_out_norm", "input_out_norm"),
    *("router_norm", "experts_norm", "shared_out_norm", "experts_out_norm"),
    *("query", "key", "value", "output", "gate", "up", "down", "query_norm", "key_norm", "sinks"),
    *("inputs_embedding", "inputs_projection", "inputs_norm", "input_gate", "input_up", "layer_scale"),
    *("router", "correction", "expert_scale", "shared_scale", "output_gate"),
    *("mixed", "taps", "delta_gate", "delta_beta", "delta_decay", "decay_rate", "decay_shift", "delta_scale"),
)
#: Matrices that stay float32.
EXACT_MATRICES = ("router", "taps", "delta_beta", "delta_decay")
#: Weights that one product multiplies by: all of them are of codes, or none is.
MULTIPLIED_TOGETHER = (("query", "key", "value", "output_gate"), ("mixed", "delta_gate"), ("gate", "up"))
#: program.h's Kind::embed and Kind::heads.
EMBED, HEADS = 0, 3
#: meeting.h's Carry.
CARRY = ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, ctypes.c_size_t)
#: In the orders of program.h's QkNorm and Activation.
QK_NORMS = ("none", "head", "whole")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")


class PackedType(NamedTuple):
    """Its number in GGUF files, and the inputs and bytes of a block. The last block of a row may have fewer inputs."""

    number: int
    block_inputs: int
    block_bytes: int

    def row_bytes(self, num_in: int) -> int:
        """Bytes of so many inputs."""
        return -(-num_in // self.block_inputs) * self.block_bytes


#: The types of codes that matrices may be of, by the names that ggml gives them: packed.h's PackedType. Those after
#: MXFP4 are of other files, see `eventlm/models/weights/unpack.py`.
PACKED_TYPES = {
    "Q4_0": PackedType(2, 32, 18),
    "Q4_1": PackedType(3, 32, 20),
    "Q5_0": PackedType(6, 32, 22),
    "Q5_1": PackedType(7, 32, 24),
    "Q8_0": PackedType(8, 32, 34),
    "Q2_K": PackedType(10, 256, 84),
    "Q3_K": PackedType(11, 256, 110),
    "Q4_K": PackedType(12, 256, 144),
    "Q5_K": PackedType(13, 256, 176),
    "Q6_K": PackedType(14, 256, 210),
    "IQ4_NL": PackedType(20, 32, 18),
    "IQ4_XS": PackedType(23, 256, 136),
    "MXFP4": PackedType(39, 32, 17),
    "I4_32": PackedType(1000, 32, 22),
    "I4_128": PackedType(1001, 128, 70),
    "I8_32": PackedType(1002, 32, 38),
    "I8_128": PackedType(1003, 128, 134),
    "F8_128": PackedType(1004, 128, 132),
}


class NativeShape(ctypes.Structure):
    """What a whole decoder has, as program.h says.

    is_tied: whether the embedding is the output matrix, 0 or 1. has_lm_head: whether logits are wanted of it, likewise.
    """

    _fields_ = (
        *(
            (name, c_int32)
            for name in (
                "vocab_size",
                "hidden_size",
                "num_layers",
                "is_tied",
                "has_lm_head",
                "is_layer_norm",
                "inputs_size",
                "inputs_vocab_size",
            )
        ),
        *((name, c_float) for name in ("eps", "logits_multiplier", "logits_soft_cap")),
    )


class Instruction(ctypes.Structure):
    """An operation of a step, as program.h describes it. What an operation does not have is 0."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in (
                "kind",
                "layer",
                "weight",
                "num_neurons",
                "activation",
                "is_gated",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "qk_norm",
                "rope",
                "rotary_dim",
                "is_interleaved",
                "num_turned",
                "window",
                "positions_per_scale",
                "num_experts",
                "num_active",
                "is_sigmoid",
                "num_groups",
                "num_active_groups",
                "is_normalized",
                "has_output_gate",
                "num_channels",
                "num_taps",
                "state",
                "num_key_heads",
                "num_value_heads",
                "key_dim",
                "value_dim",
                "has_value_norm",
            )
        ),
        *((name, c_float) for name in ("multiplier", "score_divisor", "soft_cap", "query_scaling_beta", "min_sum")),
    )


class NativeModel(NamedTuple):
    """A decoder as the compiled pass takes it. `norm_offset` is added to the weights of norms as they are loaded."""

    shape: NativeShape
    instructions: list[Instruction]
    norm_offset: float


def unsupported(model: NativeModel, block_size: int) -> str:
    """Why the compiled decoder cannot run a model; empty if it can."""
    if model.shape.hidden_size % _LANES:
        return f"a hidden size of {model.shape.hidden_size} is not a multiple of {_LANES}"
    inputs = model.shape.inputs_size
    if inputs % PANEL or inputs > _MAX_HEAD_DIM:
        return f"{inputs} inputs of a layer are not a multiple of {PANEL} up to {_MAX_HEAD_DIM}"
    for each in model.instructions:
        if each.num_kv_heads and (reason := unsupported_heads(each.num_heads, each.num_kv_heads, each.head_dim)):
            return reason
    if reason := unsupported_blocks(block_size):
        return reason
    has_states = any(each.num_taps for each in model.instructions)
    sizes = {size for each in model.instructions if (size := each.num_heads * each.head_dim)}
    for size in sorted(sizes):
        if size % PANEL and (has_states or len(sizes) > 1):
            # The last inputs that lie together would be those of a layer with more of them.
            return f"{size} elements of all heads are not a multiple of {PANEL}"
    return next((reason for each in model.instructions if (reason := _unsupported_state(each))), "")


def unsupported_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> str:
    """Why the compiled attention cannot run with these heads; empty if it can."""
    if head_dim % _LANES or head_dim > _MAX_HEAD_DIM:
        return f"heads of {head_dim} are not a multiple of {_LANES} up to {_MAX_HEAD_DIM}"
    group = num_heads // num_kv_heads
    return f"{group} query heads share a key" if group > _MAX_GROUP else ""


def unsupported_blocks(block_size: int) -> str:
    """The same of the KV cache's blocks."""
    is_whole = block_size % SUB_BLOCK == 0
    return "" if is_whole else f"blocks of {block_size} tokens are not a multiple of {SUB_BLOCK}"


def _unsupported_state(instruction: Instruction) -> str:
    """Why an instruction of a layer that keeps a state cannot be run."""
    if instruction.num_taps > _MAX_TAPS:
        return f"a convolution over {instruction.num_taps} tokens is longer than {_MAX_TAPS}"
    if instruction.num_channels % _CHANNELS:
        return f"{instruction.num_channels} channels of a convolution are not a multiple of {_CHANNELS}"
    if instruction.key_dim % _LANES or instruction.value_dim % _CHANNELS:
        return f"keys of {instruction.key_dim} and values of {instruction.value_dim} do not fit into vectors"
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


def column_granule(kind: str) -> int:
    """Inputs of which a matrix that is split by columns must have a multiple in each part.

    kind: one of PACKED_TYPES, "int8" or "bfloat16". Codes lie in blocks of inputs in files, which cannot be cut: 32,
    128 or 256 of them. Int8 is rotated in blocks of 64, and inputs of all products lie 32 by 32; columns of whole heads
    may be any multiple of 16 in both, and cost as much as the next multiple. Rows of a matrix may be cut anywhere, but
    those of gate and up where the columns of `down` are.
    """
    if kind == "int8":
        return 64
    return 32 if kind == "bfloat16" else PACKED_TYPES[kind].block_inputs


def packed_bytes(kind: str, num_out: int, num_in: int) -> int:
    """Bytes that a matrix of one of PACKED_TYPES takes. Needs a build that is available."""
    number: int = library(available_builds()[0]).eventlm_packed_bytes(PACKED_TYPES[kind].number, num_out, num_in)
    return number


def library_hash(build: str) -> str:
    """16 hex digits for a build that is available: other sources, flags or another compiler give others."""
    return hashlib.blake2b(_path(build).read_bytes(), digest_size=8).hexdigest()


def _path(build: str) -> Path:
    return Path(__file__).with_name(f"{build}.abi3.so")


class MeetingEndedError(RuntimeError):
    """A group of peers does not meet any more: one has left or failed, or they do not compute the same."""


def _raise_if_failed(status: int) -> None:
    """Of what returns numbers as api.cpp says."""
    if status == 1:
        raise MemoryError
    if status:
        what = "peers came to a meeting with different numbers of bytes" if status == 3 else "a peer has left or failed"
        raise MeetingEndedError(what)


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
    functions.eventlm_decoder.argtypes = (
        *(POINTER(NativeShape), POINTER(Instruction), c_int32, c_void_p, c_void_p),
        *(c_int32, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_int32),
    )
    functions.eventlm_segment_bytes.restype = c_int64
    functions.eventlm_segment_bytes.argtypes = (c_int32, c_int64)
    functions.eventlm_meeting.restype = c_void_p
    functions.eventlm_meeting.argtypes = (c_void_p, c_int32, c_int32, c_int64, c_int64)
    functions.eventlm_carried_meeting.restype = c_void_p
    functions.eventlm_carried_meeting.argtypes = (c_void_p, c_void_p, CARRY, c_void_p, c_int32, c_int32, c_int64)
    functions.eventlm_free_meeting.restype = None
    functions.eventlm_free_meeting.argtypes = (c_void_p,)
    functions.eventlm_slot.restype = c_void_p
    functions.eventlm_slot.argtypes = (c_void_p,)
    functions.eventlm_part.restype = c_void_p
    functions.eventlm_part.argtypes = (c_void_p, c_int32)
    functions.eventlm_meet.restype = _raise_if_failed
    functions.eventlm_meet.argtypes = (c_void_p, c_int64)
    functions.eventlm_gather.restype = _raise_if_failed
    functions.eventlm_gather.argtypes = (c_void_p, c_void_p, c_int64, c_void_p)
    functions.eventlm_num_meetings.restype = c_int64
    functions.eventlm_num_meetings.argtypes = (c_void_p,)
    functions.eventlm_leave.restype = None
    functions.eventlm_leave.argtypes = (c_void_p,)
    functions.eventlm_packed_bytes.restype = c_int64
    functions.eventlm_packed_bytes.argtypes = (c_int32, c_int64, c_int64)
    functions.eventlm_free.restype = None
    functions.eventlm_free.argtypes = (c_void_p,)
    functions.eventlm_set_embedding.restype = None
    functions.eventlm_set_embedding.argtypes = (c_void_p, c_int32, c_void_p)
    functions.eventlm_load_matrix.restype = _raise_if_failed
    functions.eventlm_load_matrix.argtypes = (c_void_p, c_int32, c_int32, c_int32, c_void_p, c_int64, c_int64)
    functions.eventlm_load_packed.restype = _raise_if_failed
    functions.eventlm_load_packed.argtypes = (c_void_p, c_int32, c_int32, c_int32, c_void_p, c_int64, c_int64)
    functions.eventlm_load_vector.restype = _raise_if_failed
    functions.eventlm_load_vector.argtypes = (c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p)
    functions.eventlm_load_exact.restype = None
    functions.eventlm_load_exact.argtypes = (c_void_p, c_int32, c_int32, c_void_p, c_int64, c_int64)
    functions.eventlm_pin.restype = None
    functions.eventlm_pin.argtypes = (c_void_p, c_void_p)
    functions.eventlm_forward.restype = _raise_if_failed
    functions.eventlm_forward.argtypes = (
        *(c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p),
        *(c_void_p, c_void_p, c_int32),
        *(c_void_p, c_int32, c_int32, c_int32),
        *(c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    )
    functions.eventlm_norm.restype = None
    functions.eventlm_norm.argtypes = (c_void_p, c_void_p, c_int32, c_void_p)
    functions.eventlm_logits.restype = _raise_if_failed
    functions.eventlm_logits.argtypes = (c_void_p, c_void_p, c_int32, c_void_p)
    functions.eventlm_draw.restype = _raise_if_failed
    functions.eventlm_draw.argtypes = (c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p)
    functions.eventlm_draw_next.restype = _raise_if_failed
    functions.eventlm_draw_next.argtypes = (c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_void_p)
    functions.eventlm_times.restype = POINTER(c_int64)
    functions.eventlm_times.argtypes = (c_void_p,)
    functions.eventlm_products.restype = c_void_p
    functions.eventlm_products.argtypes = (c_int64, c_int32)
    functions.eventlm_free_products.restype = None
    functions.eventlm_free_products.argtypes = (c_void_p,)
    functions.eventlm_pin_products.restype = None
    functions.eventlm_pin_products.argtypes = (c_void_p, c_void_p)
    functions.eventlm_matrix_bytes.restype = c_int64
    functions.eventlm_matrix_bytes.argtypes = (c_int64, c_int64)
    functions.eventlm_pack.restype = _raise_if_failed
    functions.eventlm_pack.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64)
    functions.eventlm_multiply.restype = _raise_if_failed
    functions.eventlm_multiply.argtypes = (c_void_p, c_void_p, c_int32, c_int64, c_void_p, c_int32)
    functions.eventlm_norm_rows.restype = None
    functions.eventlm_norm_rows.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_float, c_void_p)
    functions.eventlm_rotate.restype = None
    functions.eventlm_rotate.argtypes = (
        *(c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int32, c_int32),
        *(c_void_p, c_void_p, c_void_p),
    )
    functions.eventlm_attention.restype = c_void_p
    functions.eventlm_attention.argtypes = (c_void_p,)
    functions.eventlm_free_attention.restype = None
    functions.eventlm_free_attention.argtypes = (c_void_p,)
    functions.eventlm_begin_attention.restype = _raise_if_failed
    functions.eventlm_begin_attention.argtypes = (c_void_p, c_int32, c_void_p, c_void_p, c_void_p)
    functions.eventlm_attend.restype = _raise_if_failed
    functions.eventlm_attend.argtypes = (
        *(c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_int32),
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_float, c_float, c_void_p, c_void_p),
    )
