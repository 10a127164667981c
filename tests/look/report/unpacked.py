"""Packed columns as arrays again, as `columns.js` unpacks them in a page."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray


def columns_of(packed: dict[str, Any]) -> dict[str, NDArray[np.int64]]:
    """The columns of a packed table by name."""
    found: dict[str, NDArray[np.int64]] = {}
    for column in packed["columns"]:
        values = np.array(list(_varints(zlib.decompress(base64.b64decode(column["data"])))), np.int64)
        if column["form"] == "above":
            values = np.cumsum(values)
        elif column["form"] == "other":
            values = values + found[column["other"]] // column["unit"]
        found[column["name"]] = values * column["unit"]
        assert len(values) == packed["rows"]
    return found


def _varints(data: bytes) -> Any:
    value = shift = 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield -(value >> 1) - 1 if value & 1 else value >> 1
            value = shift = 0
