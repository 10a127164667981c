"""Integer columns packed for a page, which `columns.js` unpacks into typed arrays.

Each value is written as the difference to the one above it, or to the value of another column in its row, or as it is;
whichever is the shortest. Differences take one byte for each seven bits, with the sign in the lowest bit, and the bytes
are deflated and written in base64.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy
from numpy.typing import ArrayLike, NDArray

#: Beyond it, a difference of two values would not be exact in JavaScript. In ns, it is 52 days.
LARGEST_VALUE = 1 << 52
_SAMPLE_ROWS = 20_000
_LARGEST_INT32 = 2**31 - 1


def pack_columns(
    columns: Mapping[str, ArrayLike],
    *,
    relative_to: Mapping[str, str] | None = None,
    units: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Columns of one length as an object for JSON.

    columns: integers of at most LARGEST_VALUE, signed. relative_to: the column, named before and in the same unit, that
    a column's values are close to in each row, such as the start of an interval for its end. units: a column is rounded
    down to multiples of its unit, such as 1,000 for ns of which microseconds suffice. Raises ValueError for anything
    else.
    """
    relative_to = relative_to or {}
    units = units or {}
    arrays: dict[str, NDArray[numpy.int64]] = {}
    packed: list[dict[str, Any]] = []
    rows = 0
    for name, values in columns.items():
        array = numpy.asarray(values)
        if array.size == 0:
            array = array.astype(numpy.int64)
        if array.ndim != 1 or array.dtype.kind not in "iub":
            raise ValueError(f"column {name}: needs integers in one dimension, not {array.dtype} in {array.ndim}")
        if array.size and (array.max() > LARGEST_VALUE or array.min() < -LARGEST_VALUE):
            raise ValueError(f"column {name}: a page holds values up to {LARGEST_VALUE}; count from a later start")
        if packed and len(array) != rows:
            raise ValueError(f"column {name}: {len(array)} rows where the others have {rows}")
        rows, unit, other = len(array), units.get(name, 1), relative_to.get(name)
        if other is not None and (other not in arrays or units.get(other, 1) != unit):
            raise ValueError(f"column {name}: {other} must stand before it, in the same unit")
        arrays[name] = array.astype(numpy.int64) // unit
        packed.append({"name": name, "unit": unit} | _pack(arrays[name], unit, other, arrays.get(other or "")))
    return {"rows": rows, "columns": packed}


def _pack(
    values: NDArray[numpy.int64], unit: int, other: str | None, others: NDArray[numpy.int64] | None
) -> dict[str, Any]:
    forms = {"plain": values, "above": numpy.diff(values, prepend=0)}
    if others is not None:
        forms["other"] = values - others
    # A sample tells which form is short; to write all rows in each takes three times as long.
    form = min(forms, key=lambda each: len(zlib.compress(_varints(forms[each][:_SAMPLE_ROWS]), 6)))
    data = base64.b64encode(zlib.compress(_varints(forms[form]), 6)).decode()
    fits = not values.size or max(-int(values.min()), int(values.max())) * unit <= _LARGEST_INT32
    packed: dict[str, Any] = {"form": form, "type": "int32" if fits else "float64", "data": data}
    return packed | ({"other": other} if form == "other" else {})


def _varints(values: NDArray[numpy.int64]) -> bytes:
    """Seven bits a byte, lowest first, all but the last with the highest bit; signs are in the lowest bit."""
    rest: NDArray[Any] = ((values << 1) ^ (values >> 63)).view(numpy.uint64)
    lengths = numpy.ones(len(rest), dtype=numpy.int64)
    for bits in range(7, 64, 7):
        lengths += rest >= (1 << bits)
    ends = numpy.cumsum(lengths)
    starts = ends - lengths
    written = numpy.zeros(int(ends[-1]) if len(ends) else 0, dtype=numpy.uint8)
    number = 0
    while len(rest):
        more = lengths > number + 1
        written[starts + number] = (rest & 127) | (more.astype(numpy.uint64) << 7)
        rest, starts, lengths = rest[more] >> 7, starts[more], lengths[more]
        number += 1
    return written.tobytes()
