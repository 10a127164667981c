"""int8 in the compiled forward pass: products against exact integers, whole models against float32."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eventlm.kernels.int8_linear import dequantize_rows, int8_linear, quantize_rows
from eventlm.models.loader import load_cpu_decoder, load_decoder
from tests.kernels.cpu.decoders import (
    CompiledDecoder,
    Piece,
    Shape,
    TorchDecoder,
    only,
    random_sequences,
    relative_error,
    scattered_tables,
    write_checkpoint,
)

#: How far logits may be from those of float32, with keys and values of each type.
KV_DTYPES = {"bfloat16": 0.08, "int8": 0.08, "fp8": 0.16}
#: Hidden size and vocabulary: inputs that fill no block, one and several; outputs that fill no panel.
SIZES = [(16, 33), (80, 97), (64, 128), (208, 31), (1024, 65)]


def integers(count: int, hidden: int, *, seed: int) -> torch.Tensor:
    """Rows whose norms and rotations are exact in float32, so that all builds must round them alike."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (count, hidden), generator=generator).float()


@pytest.mark.parametrize(("hidden", "vocab"), SIZES)
def test_products_are_exact(builds: list[str], tmp_path: Path, hidden: int, vocab: int) -> None:
    """Logits are one product: those of each build, row count and team are what integers give, scaled."""
    shape = Shape(hidden=hidden, vocab=vocab, inner=16, num_layers=1)
    folder = write_checkpoint(tmp_path, shape)
    weight = load_file(folder / "model.safetensors")["lm_head.weight"]
    values, scales = quantize_rows(weight)
    rows = integers(40, hidden, seed=1)
    first: torch.Tensor | None = None
    for build in builds:
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
def test_a_model(builds: list[str], tmp_path: Path, shape: Shape) -> None:
    """Each build, with keys and values in each format, and torch's operations are about as far from float32."""
    folder = write_checkpoint(tmp_path, shape)
    [sequence] = random_sequences(shape.vocab, [100])
    expected = TorchDecoder(folder, "float32").run(sequence)
    pieces = [[Piece(0, 0, 60)], [Piece(0, 60, 61)], [Piece(0, 61, 100)]]
    for build, (kv_dtype, limit) in itertools.product(builds, KV_DTYPES.items()):
        decoder = CompiledDecoder(folder, build, quantization="int8", kv_dtype=kv_dtype, num_threads=2)
        found = only(decoder.run([sequence], scattered_tables([100], 16, 64), pieces))
        assert 0.001 < relative_error(found.logits_TV, expected.logits_TV) < limit, (build, kv_dtype)
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


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_so_in_its_row_alone(builds: list[str], tmp_path: Path, value: float) -> None:
    """Of activations in each build, and in torch's operations."""
    folder = write_checkpoint(tmp_path, Shape(hidden=208, vocab=97, inner=16, num_layers=1))
    rows = integers(19, 208, seed=2)
    spoilt = rows.clone()
    spoilt[[0, 7, 18], [3, 100, 207]] = value
    is_whole = torch.ones(19, dtype=torch.bool)
    is_whole[[0, 7, 18]] = False
    for build in builds:
        decoder = load_cpu_decoder(folder, build, quantization="int8", max_positions=64, num_threads=2)
        found = decoder.logits(spoilt)
        assert found[~is_whole].isnan().all(), build
        assert torch.equal(found[is_whole], decoder.logits(rows)[is_whole]), build
        # Nothing of it is left where the next step's rows lie.
        assert decoder.logits(rows).isfinite().all(), build
    weight = quantize_rows(torch.randn(5, 208, generator=torch.Generator().manual_seed(3)))
    found = int8_linear(spoilt, *weight, None)
    assert found[~is_whole].isnan().all()
    assert torch.equal(found[is_whole], int8_linear(rows, *weight, None)[is_whole])


def test_what_is_no_number_among_the_weights_stays_so(builds: list[str], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, Shape(hidden=80, vocab=97, num_layers=1))
    edit_tensor(folder, "lm_head.weight", row=40, value=torch.nan)
    edit_tensor(folder, "lm_head.weight", row=96, value=torch.inf)
    rows = integers(5, 80, seed=4)
    decoders = [
        load_cpu_decoder(folder, build, quantization="int8", max_positions=64, num_threads=1) for build in builds
    ]
    logits = [decoder.logits(rows) for decoder in decoders] + [
        load_decoder(folder, quantization="int8").logits(rows.bfloat16())
    ]
    for found in logits:
        assert found.isnan().any(0).nonzero()[:, 0].tolist() == [40, 96]
        assert found[:, [40, 96]].isnan().all()


def edit_tensor(folder: Path, name: str, *, row: int, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name][row, 3] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("kv_dtype", "place"), [("bfloat16", 20), ("int8", 17), ("fp8", 17)])
def test_a_token_that_is_no_number_spoils_what_follows_it_and_nothing_else(
    builds: list[str], tmp_path: Path, kv_dtype: str, place: int
) -> None:
    """In whole models: the same sequences with and without it.

    With bfloat16 it begins a tile of 10 queries: among the values it spoils all of its tile.
    """
    folder = write_checkpoint(tmp_path, Shape(80, 77, 97, 3, 1, 80))
    edit_tensor(folder, "model.embed_tokens.weight", row=96, value=torch.nan)
    sequences = [[number * 7 % 96 for number in range(first, first + 40)] for first in (0, 5)]
    spoilt = [[*sequences[0][:place], 96, *sequences[0][place + 1 :]], sequences[1]]
    tables = scattered_tables([40, 40], 16, 64)
    steps = [[Piece(0, 0, 30), Piece(1, 0, 39)], [Piece(0, 30, 31), Piece(1, 39, 40)], [Piece(0, 31, 40)]]
    for build in builds:
        decoder = CompiledDecoder(folder, build, quantization="int8", kv_dtype=kv_dtype)
        expected, found = decoder.run(sequences, tables, steps), decoder.run(spoilt, tables, steps)
        assert torch.equal(found[1].logits_TV, expected[1].logits_TV), build
        assert torch.equal(found[0].logits_TV[:place], expected[0].logits_TV[:place]), build
        assert found[0].logits_TV[place:].isnan().all(), build


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_a_head_that_is_no_number_spoils_every_token(
    builds: list[str], tmp_path: Path, name: str, kv_dtype: str
) -> None:
    """Its queries, its keys or its values alone."""
    shape = Shape()
    folder = write_checkpoint(tmp_path, shape)
    edit_tensor(folder, f"model.layers.0.self_attn.{name}.weight", row=5, value=torch.nan)
    [sequence] = random_sequences(shape.vocab, [70])
    steps = [[Piece(0, 0, 60)], [Piece(0, 60, 61)], [Piece(0, 61, 70)]]
    for build in builds:
        decoder = CompiledDecoder(folder, build, kv_dtype=kv_dtype)
        found = only(decoder.run([sequence], scattered_tables([70], 16, 64), steps))
        assert found.logits_TV.isnan().all(), build


@pytest.mark.parametrize("size", [1e-38, 1e-40, 1e-45, 0.0])
def test_rows_of_next_to_nothing_are_zeros(size: float) -> None:
    x = torch.full((3, 70), size)
    x[1] = torch.arange(70.0)
    values, scales = quantize_rows(x)
    assert not values[[0, 2]].any()
    assert scales.isfinite().all()
    found = int8_linear(x, *quantize_rows(torch.ones(4, 70)), None)
    assert not found[[0, 2]].any()
    assert relative_error(found[1], torch.full((4,), 2415.0)) < 0.02
