"""The blocks of numbers that rows of a GGUF file's matrices consist of, and the values that they stand for.

Loads the `gguf` package, which takes long, when it is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def unpack(blocks: Tensor, kind: str) -> Tensor:
    """Rows of blocks of a type, uint8 [rows, bytes], as the values that gguf-py gives them, float32 [rows, in]."""
    import numpy as np
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    # A damaged scale may be infinite.
    with np.errstate(all="ignore"):
        return torch.from_numpy(dequantize(blocks.numpy(), GGMLQuantizationType[kind]))
