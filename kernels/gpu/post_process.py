"""Load of a set size: what a client runs after each reply to see a server under a loaded GPU.

Values are turned in a plane again and again, which takes float32 arithmetic alone and no tensor cores, or counted up in
memory again and again, which takes bandwidth alone. The result of either shows how often it was done.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

import eventlm.kernels.gpu.interpreter  # noqa: F401 - its mend
from eventlm.kernels.gpu.matmul import num_processors
from eventlm.kernels.gpu.tuned import ceil_div

Mode = Literal["compute", "memory"]

#: A turn by about 0.1 radians, as float32 has it.
_COS, _SIN = 0.9950041770935059, 0.0998334139585495
_TURN_COS, _TURN_SIN = tl.constexpr(_COS), tl.constexpr(_SIN)
_FLOPS_PER_TURN = 6


class Work(NamedTuple):
    """Floating-point operations, and bytes read and written."""

    num_flops: int
    num_bytes: int


def post_process(values_N: Tensor, *, iterations: int, mode: Mode) -> Tensor:
    """`values` [N] float32 after that many iterations; a new tensor of the same shape.

    "compute": the first coordinate of the points (value, 0), turned `iterations` times; a multiprocessor is busy with
    some 1000 values. "memory": 1 is added `iterations` times, each time through memory; values that fit into the L2
    cache stay there. `iterations` is at least 1 and below 2^31.
    """
    out, num_values = torch.empty_like(values_N), values_N.shape[0]
    block = 1024 if mode == "compute" else 2048
    blocks = ceil_div(num_values, block)
    if not blocks:
        return out
    if mode == "compute":
        _turn_kernel[(blocks,)](values_N, out, num_values, iterations, BLOCK=block)
    else:
        programs = min(blocks, 8 * num_processors(values_N.device))
        _count_kernel[(programs,)](values_N, out, num_values, iterations, BLOCK=block)
    return out


def work(num_values: int, *, iterations: int, mode: Mode) -> Work:
    """The least work for `post_process`, so that its time shows how fast the device was."""
    if mode == "compute":
        return Work(num_values * iterations * _FLOPS_PER_TURN, num_values * 8)
    return Work(num_values * iterations, num_values * iterations * 8)


def iterations_for(amount: float, num_values: int, *, mode: Mode) -> int:
    """The fewest iterations that do `amount` FLOPs ("compute") or move `amount` bytes ("memory"); at least 1."""
    once = work(num_values, iterations=1, mode=mode)
    return max(1, -int(-amount // (once.num_flops if mode == "compute" else once.num_bytes)))


def post_process_reference(values_N: Tensor, *, iterations: int, mode: Mode) -> Tensor:
    """The same at once, in float64."""
    if mode == "compute":
        return values_N.double() * (complex(_COS, _SIN) ** iterations).real
    return values_N.double() + iterations


@triton.jit(do_not_specialize=["iterations"])
def _turn_kernel(values, out, num_values, iterations, BLOCK: tl.constexpr):
    indices = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + indices, mask=indices < num_values, other=0.0)
    y = tl.zeros_like(x)
    for _ in range(iterations):
        turned = x * _TURN_COS - y * _TURN_SIN
        y = x * _TURN_SIN + y * _TURN_COS
        x = turned
    tl.store(out + indices, x, mask=indices < num_values)


@triton.jit(do_not_specialize=["iterations"])
def _count_kernel(values, out, num_values, iterations, BLOCK: tl.constexpr):
    # All of a program's blocks before any of them again: the next time, the caches hold others'.
    source = values
    for _ in range(iterations):
        for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(num_values, BLOCK), tl.num_programs(0)):
            indices = block * BLOCK + tl.arange(0, BLOCK)
            counted = tl.load(source + indices, mask=indices < num_values) + 1
            tl.store(out + indices, counted, mask=indices < num_values)
        source = out
        tl.debug_barrier()
