"""Whether kernels run in Triton's interpreter, on the CPU, as in tests where there is no GPU, and a mend of it.

Kernels with loops up to what is not a constant import this module for the mend, if for nothing else.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
#: The interpreter multiplies bfloat16 matrices wrongly, without a word: with this, operands of `tl.dot` are converted.
UPCAST = tl.constexpr(_IS_INTERPRETED)


def _mend_bounds_of_loops() -> None:
    """Scalars are arrays of one element there, of which Triton 3.6 makes integers in a way that NumPy 2.5 refuses."""
    from triton.runtime import interpreter

    patch_lang_tensor = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: Any) -> None:
        patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


if _IS_INTERPRETED and triton.__version__.startswith("3.6."):
    _mend_bounds_of_loops()
