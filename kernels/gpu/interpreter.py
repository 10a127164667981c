"""Whether kernels run in Triton's interpreter, on the CPU, as in tests where there is no GPU, and mends of it.

Kernels with products, or loops up to what is not a constant, import this module for the mends, if for nothing else.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
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


def _mend_products() -> None:
    """NumPy's libraries may sum the rows of a tile in different orders: a row in another place has other bits then, as
    on no GPU. So products are of float64, and rounded after the sum.
    """
    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot

    def mended(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        factors = (a.data, b.data)
        if d.data.dtype != np.float32 or any(each.dtype not in (np.float16, np.float32) for each in factors):
            return create_dot(self, a, b, d, *options)
        product = np.matmul(*factors, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = mended


def _mend_slow_launches() -> None:
    """A launch, and each call of a function within it, looks through Triton's language for what it has to replace,
    and each operation makes a table of NumPy's types: half of the time of a small kernel. Here a launch replaces
    everything at once, which leaves nothing to its calls, and types are remembered.
    """
    from triton.runtime import interpreter

    patch_lang, numpy_type = interpreter._patch_lang, functools.cache(interpreter._get_np_dtype)
    scope = interpreter._LangPatchScope()

    def patch(fn: Any) -> Any:
        nonlocal scope
        if scope._changes:
            return interpreter._LangPatchScope()
        scope = patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        return scope

    interpreter._patch_lang = patch
    interpreter._get_np_dtype = lambda each: np.dtype(np.uint64) if each.scalar.is_ptr() else numpy_type(each.scalar)


if _IS_INTERPRETED:
    _mend_products()
    if triton.__version__.startswith("3.6."):
        _mend_bounds_of_loops()
    if triton.__version__.startswith("3.7."):
        _mend_slow_launches()
