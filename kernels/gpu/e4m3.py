"""Elements of an fp8 (e4m3) cache, in pairs, as float16.

A pair is loaded as one 16-bit integer, so that the tensor cores' loads from shared memory, which transpose 16 bits at a
time, serve it; its two elements become operands of two products. Moving the bits is exact, subnormals too, and needs no
instruction that only newer GPUs have.
"""

from __future__ import annotations

import triton
import triton.language as tl

from eventlm.kernels.gpu.interpreter import UPCAST

#: The exponent of float16 is biased by 8 more: what is unpacked is to be multiplied by this.
E4M3_UNIT = tl.constexpr(256.0)


@triton.jit
def unpack_e4m3(pairs):
    """int16 of any shape to (the elements at even places, those at odd ones), float16, divided by E4M3_UNIT."""
    if UPCAST:
        even = ((pairs << 8) & -0x8000) | ((pairs << 7) & 0x3F80)
        odd = (pairs & -0x8000) | ((pairs >> 1) & 0x3F80)
        return even.to(tl.int16).to(tl.float16, bitcast=True), odd.to(tl.int16).to(tl.float16, bitcast=True)
    # The same for two pairs in a register at once, which the compiler does not see by itself.
    return tl.inline_asm_elementwise(
        """{
            .reg .b32 shifted, rest;
            shl.b32 shifted, $2, 8;
            shr.u32 rest, shifted, 1;
            and.b32 rest, rest, 0x3F803F80;
            lop3.b32 $0, shifted, 0x80008000, rest, 0xEA;
            shr.u32 rest, $2, 1;
            and.b32 rest, rest, 0x3F803F80;
            lop3.b32 $1, $2, 0x80008000, rest, 0xEA;
        }""",
        "=&r,=&r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def load_scales(pointers, is_token):
    """float32 [N] at the pointers of N tokens, 0 where there is none.

    As a column, which they stay: N numbers alone are so few that the compiler would have each thread load all that it
    multiplies by, many times over, rather than hand them round.
    """
    return tl.sum(tl.load(pointers[:, None], mask=is_token[:, None], other=0.0), 1)
