"""Weights in blocks are loaded as the values that gguf-py gives them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from torch import Tensor

from eventlm.models.config import read_model
from eventlm.models.fetch.gguf_folder import gguf_folder
from eventlm.models.gguf.blocks import unpack
from eventlm.models.gguf.header import TENSOR_TYPES, read_header
from eventlm.models.loader import load_decoder
from eventlm.models.program import WeightKey
from eventlm.models.weights import weight_reader
from eventlm.models.weights.find_weights import find_weights
from eventlm.models.weights.stored_weights import StoredWeight, WeightFile
from eventlm.models.weights.weight_reader import read_pieces
from tests.models.families.proof import SMALL, make_checkpoint
from tests.models.gguf.files import finish, to_gguf

ROWS, COLUMNS = 130, 512
BLOCKS = [name for name in TENSOR_TYPES if name not in ("F32", "F16", "BF16")]


def random_blocks(kind: str) -> np.ndarray:
    elements, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return np.random.default_rng(7).integers(0, 256, (ROWS, COLUMNS // elements * num_bytes), dtype=np.uint8)


@pytest.mark.parametrize("kind", BLOCKS)
def test_all_types_are_unpacked_piece_by_piece(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of random bytes: scales are infinite, and no numbers, too."""
    monkeypatch.setattr(weight_reader, "_PIECE_BYTES", 100_000)
    blocks, path = random_blocks(kind), tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("a.weight", np.zeros((1, 32), np.float32))
    writer.add_tensor("b.weight", blocks, raw_dtype=GGMLQuantizationType[kind])
    finish(writer)
    header = read_header(path)
    stored = header.tensors[1]
    assert (stored.type, stored.shape, stored.num_bytes) == (kind, (ROWS, COLUMNS), blocks.nbytes)
    key = WeightKey("up", 0, "weight")
    weight = StoredWeight(key, "b.weight", kind, stored.shape, stored.offset, num_bytes=stored.num_bytes)
    found, told = torch.full((ROWS, COLUMNS), 7.0), []
    pieces = read_pieces([WeightFile(path, header.stamp, [weight])], lambda *bytes_read: told.append(bytes_read))
    for _, first_row, values in pieces:
        assert first_row % 32 == 0
        found[first_row : first_row + len(values)] = values
    with np.errstate(all="ignore"):
        wanted = gguf.dequantize(blocks, GGMLQuantizationType[kind])
    assert same_bits(found, torch.from_numpy(wanted))
    assert same_bits(unpack(torch.from_numpy(blocks), kind), torch.from_numpy(wanted))
    assert len(told) > 2
    assert told[-1] == (blocks.nbytes, blocks.nbytes)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def test_heads_are_put_in_order_in_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces hold whole heads, of 48 rows here, and a multiple of 32 rows."""
    monkeypatch.setattr(weight_reader, "_PIECE_BYTES", 1)
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))
    fields = SMALL | {"head_dim": 48, "num_attention_heads": 6, "hidden_size": 96, "attention_bias": True}
    make_checkpoint(tmp_path / "checkpoint", "LlamaForCausalLM", **fields)
    to_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", "llama", "Q8_0")
    folder = gguf_folder(tmp_path / "model.gguf")
    rows = {(key.name, first_row) for key, first_row, _ in read_pieces(find_weights(folder, read_model(folder)))}
    assert {first for name, first in rows if name == "query"} == {0, 96, 192}
    assert {first for name, first in rows if name == "value"} == {0, 32, 64}
    found, wanted = (load_decoder(each, dtype="float32").weights for each in (folder, tmp_path / "checkpoint"))
    for key, weight in wanted.items():
        expected = weight
        if weight.dim() == 2:
            kind = GGMLQuantizationType.Q8_0
            expected = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), kind), kind))
        assert torch.equal(found[key], expected), key
