"""Keys and values of one byte an element, in each build, against float32 with keys and values rounded the same way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eventlm.kernels.kv_quantization import STORED_DTYPES, dequantize, quantize
from tests.kernels.cpu.decoders import (
    CompiledDecoder,
    Piece,
    Shape,
    TorchDecoder,
    random_sequences,
    random_steps,
    relative_error,
    scattered_tables,
    write_checkpoint,
)

#: Groups of 2 and 3 query heads, heads that fit tiles and that do not.
SHAPES = [Shape(96, 96, 128, 4, 2, 64, qk_norm=True), Shape(80, 77, 97, 3, 1, 80, attention_bias=True)]


class Reference:
    """Some sequences of a model, in float32 and by each build with keys and values of bfloat16."""

    def __init__(self, folder: Path, shape: Shape, builds: list[str]) -> None:
        self.folder = write_checkpoint(folder, shape)
        lengths = [170, 1, 17, 1100]
        self.sequences = random_sequences(shape.vocab, lengths)
        self._tables = scattered_tables(lengths, 32, 50)
        # The last one's last tokens are decodes in two passes.
        self._steps = [[Piece(3, 0, 1090)], *random_steps(lengths, [0, 0, 0, 1090], seed=5)]
        self.exact = TorchDecoder(self.folder, "float32")
        self.expected = torch.cat([self.exact.run(sequence).hidden_TH for sequence in self.sequences])
        self.plain_errors = {build: relative_error(self.run(build), self.expected) for build in builds}

    def run(self, build: str, *, kv_dtype: str = "bfloat16", num_threads: int = 1) -> Tensor:
        """Mixed steps over blocks that begin as garbage."""
        decoder = CompiledDecoder(
            self.folder, build, kv_dtype=kv_dtype, block_size=32, num_blocks=50, num_threads=num_threads
        )
        computed = decoder.run(self.sequences, self._tables, self._steps)
        return torch.cat([one.hidden_TH for one in computed])


@pytest.fixture(scope="module", params=SHAPES, ids=["fits tiles", "does not"])
def reference(builds: list[str], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("model"), request.param, builds)


@pytest.mark.parametrize("kv_dtype", STORED_DTYPES)
def test_keys_and_values_are_those_that_rounding_gives(builds: list[str], reference: Reference, kv_dtype: str) -> None:
    """Scales of NaN are among the garbage in the blocks; and three threads give the same bits."""

    def store(x: Tensor) -> Tensor:
        return dequantize(quantize(x, STORED_DTYPES[kv_dtype]), x.dtype)

    rounded = torch.cat([reference.exact.run(sequence, store).hidden_TH for sequence in reference.sequences])
    effect = relative_error(rounded, reference.expected)
    assert effect < 0.08
    for build in builds:
        found = reference.run(build, kv_dtype=kv_dtype)
        # Queries, weights and activations are rounded beside; and what lies between two elements may go to either.
        assert relative_error(found, rounded) < 1.25 * reference.plain_errors[build] + 0.35 * effect, build
        # How work is shared out is one thing for all builds without tiles.
        if build in builds[:2]:
            assert torch.equal(reference.run(build, kv_dtype=kv_dtype, num_threads=3), found)


@pytest.mark.parametrize("kv_dtype", STORED_DTYPES)
@pytest.mark.parametrize("size", [1e-36, 1e-38, 1e-40])
def test_keys_and_values_of_next_to_nothing_are_as_good_as_zeros(
    builds: list[str], tmp_path: Path, kv_dtype: str, size: float
) -> None:
    """Far below what the residual stream can show, where the inverse of a scale would be infinite."""
    sequences, tables = [list(range(40)), [5]], scattered_tables([40, 1], 16, 8)
    steps = [[Piece(0, 0, 20), Piece(1, 0, 1)], [Piece(0, 20, 39)], [Piece(0, 39, 40)]]
    found: dict[tuple[str, float], Tensor] = {}
    for factor in (size, 0.0):
        folder = write_checkpoint(tmp_path / str(factor), SHAPES[0]._replace(qk_norm=False))
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in tensors.items():
            if "k_proj" in name or "v_proj" in name:
                tensor.copy_(tensor.float() * factor)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for build in builds:
            decoder = CompiledDecoder(folder, build, kv_dtype=kv_dtype, num_blocks=8)
            computed = decoder.run(sequences, tables, steps)
            found[build, factor] = torch.cat([one.hidden_TH for one in computed])
    for build in builds:
        assert found[build, size].isfinite().all(), build
        assert torch.equal(found[build, size], found[build, 0.0]), build
