from __future__ import annotations

from eventlm.kernels.cpu.native import PACKED_TYPES
from eventlm.kernels.gpu.code_types import CODE_TYPES, code_bytes


def test_they_are_those_of_the_compiled_decoder() -> None:
    for name, kind in CODE_TYPES.items():
        scale_bytes = {"float16": 2, "float32": 4, "power": 1}[kind.scale]
        block_bytes = scale_bytes + (kind.shift != "none") * 2 + kind.group * kind.bits // 8
        assert (PACKED_TYPES[name].block_inputs, PACKED_TYPES[name].block_bytes) == (kind.group, block_bytes)


def test_sizes() -> None:
    assert code_bytes("Q4_0", 10, 64) == 10 * (32 + 2 * 2)
    # In whole units of 64 inputs.
    assert code_bytes("Q4_1", 1, 96) == 64 + 3 * 4
    assert code_bytes("I8_128", 3, 160) == 3 * (160 + 2 * 6)
