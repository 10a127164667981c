"""Where the weights of a decoder lie in a checkpoint's files. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eventlm.models.checkpoint.safetensors_header import FileStamp
from eventlm.models.program import WeightKey
from eventlm.models.weights.quantized_matrices import QuantizedMatrix
from eventlm.models.weights.slices import Ranges

#: Dtypes of tensors that are not quantized.
STORED_DTYPES = ("BF16", "F16", "F32", "F64")


class StoredWeight(NamedTuple):
    """Where a weight lies in a file: it is the tensor `name`, or some rows of it.

    `offset` is that of its data from the start of the file, in bytes. first_row: rows of the weight that are not there
    but before it, so that a weight may lie in several pieces. interleaved: the weights whose rows are in turns
    the columns of what lies there, or the elements of a vector; empty: it is `key` as it lies. The rest is of GGUF
    files: `num_bytes` of the data if it is blocks, `head_rows` of a head if those that are rotated together are
    neighbours, what is `added` to values, and whether values are `exponentials`, -exp(x) in place of x.

    rows, columns: what is wanted of the data that lies there, in this order; empty: all. Then `key` and `first_row` are
    those of a smaller decoder.
    """

    key: WeightKey
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int = 0
    head_rows: int = 0
    added: float = 0.0
    exponentials: bool = False
    interleaved: tuple[WeightKey, ...] = ()
    first_row: int = 0
    rows: Ranges = ()
    columns: Ranges = ()


class WeightFile(NamedTuple):
    """A file of a checkpoint with the weights that the decoder takes from it, in the order of their data.

    quantized: matrices whose codes are in it; their other parts may be in other files.
    """

    path: Path
    stamp: FileStamp
    weights: list[StoredWeight]
    quantized: Sequence[QuantizedMatrix] = ()
