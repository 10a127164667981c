"""int8 in the compiled forward pass: products against exact integers, whole models against float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eventlm.kernels.cpu.native import available_builds
from eventlm.kernels.int8_linear import dequantize_rows, int8_linear, quantize_rows
from eventlm.models.loader import load_cpu_decoder, load_decoder
from tests.kernels.cpu.decoders import Shape, TorchDecoder, random_sequences, relative_error, write_checkpoint

BUILDS_HERE = available_builds()
#: Hidden size and vocabulary: inputs that fill no block, one and several; outputs that fill no panel.
SIZES = [(16, 33), (80, 97), (64, 128), (208, 31), (1024, 65)]


def integers(count: int, hidden: int, *, seed: int) -> torch.Tensor:
    """Rows whose norms and rotations are exact in float32, so that all builds must round them alike."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (count, hidden), generator=generator).float()


@pytest.mark.parametrize(("hidden", "vocab"), SIZES)
def test_products_are_exact(tmp_path: Path, hidden: int, vocab: int) -> None:
    """Logits are one product: those of each build, row count and team are what integers give, scaled."""
    shape = Shape(hidden=hidden, vocab=vocab, inner=16, num_layers=1)
    folder = write_checkpoint(tmp_path, shape)
    weight = load_file(folder / "model.safetensors")["lm_head.weight"]
    values, scales = quantize_rows(weight)
    rows = integers(40, hidden, seed=1)
    first: torch.Tensor | None = None
    for build in BUILDS_HERE:
        for num_threads in (1, 2):
            decoder = load_cpu_decoder(folder, build, quantization="int8", max_positions=64, num_threads=num_threads)
            found = decoder.logits(rows)
            inputs, input_scales = quantize_rows(decoder.norm(rows).bfloat16())
            sums = inputs.numpy().astype(np.int64) @ values.numpy().astype(np.int64).T
            expected = torch.from_numpy(sums).float() * (input_scales[:, None] * scales)
            # The reference does not round what it has rotated to bfloat16 before it rounds it to int8.
            assert relative_error(found, expected) < 0.01, build
            for count in (1, 2, 3, 4, 5, 16, 17, 33):
                assert torch.equal(decoder.logits(rows[:count]), found[:count]), (build, num_threads, count)
            first = found if first is None else first
            assert torch.equal(found, first), (build, num_threads)


@pytest.mark.parametrize(
    "shape",
    [Shape(), Shape(48, 101, 333, 2, 2, 64, qk_norm=True, tied=True), Shape(80, 77, 97, 3, 1, 80, mlp_bias=True)],
)
def test_a_model(tmp_path: Path, shape: Shape) -> None:
    """Each build and torch's operations are about as far from float32."""
    from tests.kernels.cpu.decoders import CompiledDecoder, Piece, only, scattered_tables

    folder = write_checkpoint(tmp_path, shape)
    [sequence] = random_sequences(shape, [100])
    expected = TorchDecoder(folder, "float32").run(sequence)
    pieces = [[Piece(0, 0, 60)], [Piece(0, 60, 61)], [Piece(0, 61, 100)]]
    for build in BUILDS_HERE:
        decoder = CompiledDecoder(folder, build, num_threads=2)
        decoder.decoder = load_cpu_decoder(folder, build, quantization="int8", max_positions=4096, num_threads=2)
        found = only(decoder.run([sequence], scattered_tables([100], 16, 64), pieces))
        assert 0.001 < relative_error(found.logits_TV, expected.logits_TV) < 0.08, build
    quantized = TorchDecoder(folder, "bfloat16")
    quantized.decoder = load_decoder(folder, quantization="int8")
    assert 0.001 < relative_error(quantized.run(sequence).logits_TV, expected.logits_TV) < 0.08


@pytest.mark.parametrize("num_inputs", [1, 63, 64, 200])
def test_torch_s_operations(monkeypatch: pytest.MonkeyPatch, num_inputs: int) -> None:
    """With the library's product of bytes, and without: the same, and near to that of the floats."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*size, generator=generator) for size in ((5, num_inputs), (7, num_inputs), (7,)))
    x[0] = 0
    values, scales = quantize_rows(weight)
    assert torch.allclose(dequantize_rows(values, scales, num_inputs), weight, atol=0.06)
    found = int8_linear(x, values, scales, bias)
    monkeypatch.setattr("eventlm.kernels.int8_linear.processor_flags", frozenset)
    assert torch.allclose(int8_linear(x, values, scales, bias), found, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[0], bias)
    assert relative_error(found, x @ weight.T + bias) < 0.03
