"""Whether kernels run in Triton's interpreter, on the CPU, as in tests where there is no GPU."""

from __future__ import annotations

import triton
import triton.language as tl

#: The interpreter multiplies bfloat16 matrices wrongly, without a word: with this, operands of `tl.dot` are converted.
UPCAST = tl.constexpr(triton.knobs.runtime.interpret)
