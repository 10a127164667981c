"""Elements of an fp8 (e4m3) cache, in pairs, as float16.

A pair is loaded as one 16-bit integer, so that the tensor cores' loads from shared memory, which transpose 16 bits at a
time, serve it; its two elements become operands of two products. Moving the bits is exact, subnormals too, and needs no
instruction that only newer GPUs have.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: The exponent of float16 is biased by 8 more: what is unpacked is to be multiplied by this.
E4M3_UNIT = tl.constexpr(256.0)


@triton.jit
def unpack_e4m3(pairs):
    """int16 of any shape to (the elements at even places, those at odd ones), float16, divided by E4M3_UNIT."""
    even = ((pairs << 8) & -0x8000) | ((pairs << 7) & 0x3F80)
    odd = (pairs & -0x8000) | ((pairs >> 1) & 0x3F80)
    return even.to(tl.int16).to(tl.float16, bitcast=True), odd.to(tl.int16).to(tl.float16, bitcast=True)
