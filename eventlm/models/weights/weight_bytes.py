"""The size of a decoder's weights in memory. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from eventlm.kernels.cpu.native import PANEL, packed_bytes
from eventlm.kernels.gpu.code_types import code_bytes
from eventlm.models.program import FLOAT32_WEIGHTS, LOOKED_UP, WeightKey
from eventlm.models.spec import DTYPE_BYTES, ModelSpec
from eventlm.models.weights.decoder_weights import EMBEDDING, model_weights
from eventlm.models.weights.matrix_types import INT8_BLOCK
from eventlm.types import ceil_div

#: Each output of an int8 matrix has a scale, a float32.
INT8_SCALE_BYTES = 4


def gpu_weight_bytes(model: ModelSpec, dtype_name: str, types: Mapping[WeightKey, str]) -> int:
    """Bytes of the decoder's weights in a GPU's memory. types: of matrices that are codes, see `gpu_types`."""
    shapes = model_weights(model)
    num_bytes = sum(code_bytes(types[key], *shape) for key, shape in shapes.items() if key in types and len(shape) == 2)
    return num_bytes + sum(_float_bytes(key, shape, dtype_name) for key, shape in shapes.items() if key not in types)


def weight_bytes(
    model: ModelSpec, dtype_name: str, quantization: str = "none", types: Mapping[WeightKey, str] | None = None
) -> int:
    """Bytes of the decoder's weights in memory. `dtype_name` is the resolved dtype of what is not quantized.

    types: of matrices that are codes, see `matrix_types`.
    """
    num_bytes = 0
    for key, shape in model_weights(model).items():
        if types and key in types:
            num_out, num_in = shape
            attention = model.layers[key.layer].attention
            if attention is not None and key.name in ("query", "key", "value", "output_gate"):
                # Each head begins a panel.
                num_out = num_out // attention.head_dim * ceil_div(attention.head_dim, PANEL) * PANEL
            num_bytes += packed_bytes(types[key], num_out, num_in)
            continue
        is_output = key == EMBEDDING and model.tie_word_embeddings
        is_multiplied = is_output or key.name not in (*FLOAT32_WEIGHTS, *LOOKED_UP)
        if quantization == "int8" and len(shape) == 2 and is_multiplied:
            # A matrix to multiply by, not an embedding that is only looked up.
            num_out, num_in = shape
            num_bytes += num_out * (ceil_div(num_in, INT8_BLOCK) * INT8_BLOCK + INT8_SCALE_BYTES)
        else:
            num_bytes += _float_bytes(key, shape, dtype_name)
    return num_bytes


def _float_bytes(key: WeightKey, shape: tuple[int, ...], dtype_name: str) -> int:
    return math.prod(shape) * DTYPE_BYTES["float32" if key.name in FLOAT32_WEIGHTS else dtype_name]
