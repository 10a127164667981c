"""What is read for a part of a model is what a reading of all has in its place."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eventlm.core.shards import Layout
from eventlm.kernels.cpu.native import PACKED_TYPES
from eventlm.models.config import read_model
from eventlm.models.fetch.gguf_folder import gguf_folder
from eventlm.models.loader import find_checkpoint
from eventlm.models.program import WeightKey
from eventlm.models.spec import ModelSpec
from eventlm.models.weights import weight_reader
from eventlm.models.weights.cut_weights import cut_weights
from eventlm.models.weights.decoder_weights import model_weights
from eventlm.models.weights.find_weights import find_weights
from eventlm.models.weights.matrix_types import matrix_formats, packed_types
from eventlm.models.weights.slices import ModelPart, Ranges, Slice, Slices, joined
from eventlm.models.weights.stored_weights import WeightFile
from eventlm.models.weights.weight_reader import read_pieces
from eventlm.worker.ranks.shard import shard_of
from tests.models.families.proof import SMALL, make_checkpoint
from tests.models.families.test_gpt_oss import CASES as GPT_OSS
from tests.models.families.test_lfm2 import CASES as LFM2
from tests.models.families.test_qwen_next import CASES as QWEN_NEXT
from tests.models.families.test_qwen_next import DELTA, EXPERTS
from tests.models.gguf.files import to_gguf
from tests.models.quantized.checkpoints import (
    CASES,
    write_fp8_experts,
    write_gpt_oss,
    write_quantized,
)

LAYOUTS = [Layout(3), Layout(2, 2)]
#: One of each way in which parts of a quantized matrix lie.
FORMATS = (
    *("gptq, zeros", "gptq, groups in an order", "awq", "packed, zeros", "packed, groups in an order"),
    *("int8, zeros", "int8 by tensor", "float8 by block", "mxfp4"),
)
#: Value heads are more than keys, and each is a whole group of codes.
HYBRID: dict[str, Any] = (
    DELTA | EXPERTS | {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "shared_expert_intermediate_size": 96}
)


def plain(architecture: str, **fields: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        make_checkpoint(folder, architecture, **SMALL | fields)
        return folder

    return write


def quantized(case: str, architecture: str = "LlamaForCausalLM", **fields: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        write_quantized(folder, CASES[case], architecture, **fields)
        return folder

    return write


def other(make: Callable[..., Any], *args: Any, **options: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        make(folder, *args, **options)
        return folder

    return write


def of_gguf(name: str, kind: str, **fields: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        make_checkpoint(folder / "checkpoint", **SMALL | fields)
        to_gguf(folder / "checkpoint", folder / "model.gguf", name, kind)
        return gguf_folder(folder / "model.gguf")

    return write


CHECKPOINTS = {
    "biases": plain("Qwen2ForCausalLM", tie_word_embeddings=True),
    "one matrix of queries, keys and values": plain("Phi3ForCausalLM", num_attention_heads=6, num_key_value_heads=3),
    "experts in columns": plain(**GPT_OSS["gpt-oss"]),
    "experts": plain("Qwen3MoeForCausalLM", **EXPERTS),
    "convolutions": plain(**LFM2["lfm2"]),
    "rows of heads in turns": plain(**QWEN_NEXT["qwen3-next"]),
    "llama.cpp": of_gguf("llama", "Q8_0", architecture="LlamaForCausalLM", hidden_size=96, num_attention_heads=6),
    "llama.cpp, heads in turns": of_gguf("qwen35", "Q4_0", **QWEN_NEXT["qwen 3.5"]),
    "gpt-oss": other(write_gpt_oss),
    "stacked experts in FP8": other(write_fp8_experts, is_stacked=True),
    **{name: quantized(name) for name in FORMATS},
    **{f"hybrid, {name}": quantized(name, "Qwen3NextForCausalLM", **HYBRID) for name in ("fp8 by block", "awq")},
}


def read(
    model: ModelSpec, files: list[WeightFile], types: dict[WeightKey, str] | None = None
) -> dict[WeightKey, Tensor]:
    """All weights, put together of their pieces. Those with a type are blocks."""
    pieces: dict[WeightKey, list[tuple[int, Tensor]]] = {}
    for key, first_row, values in read_pieces(files, in_blocks=types or {}):
        pieces.setdefault(key, []).append(
            (first_row, values.clone() if types and key in types else values.clone().float())
        )
    found, shapes = {}, model_weights(model)
    for key, of_key in pieces.items():
        of_key.sort(key=lambda piece: piece[0])
        assert all(first % 32 == 0 or len(of_key) > 1 for first, _ in of_key)
        ends = itertools.accumulate((len(values) for _, values in of_key), initial=0)
        assert [first for first, _ in of_key] == [*ends][:-1]
        found[key] = torch.cat([values for _, values in of_key])
        if not types or key not in types:
            # A convolution may have a channel in between.
            found[key] = found[key].view(shapes[key])
    assert found.keys() == shapes.keys()
    return found


def taken(values: Tensor, rows: Ranges, columns: Ranges) -> Tensor:
    for dim, ranges in enumerate((rows, columns)):
        if ranges:
            values = values.index_select(dim, torch.tensor([*itertools.chain(*ranges)]))
    return values


def check_values(whole: dict[WeightKey, Tensor], part: ModelPart, files: list[WeightFile]) -> None:
    found = read(part.model, cut_weights(files, part.slices))
    for key, cut in part.slices.items():
        assert torch.equal(found[key], taken(whole[cut.key], cut.rows, cut.columns)), key


def check_blocks(model: ModelSpec, part: ModelPart, files: list[WeightFile]) -> None:
    """Codes stay what they are."""
    types, cut = packed_types(files), cut_weights(files, part.slices)
    cut_types = packed_types(cut)
    if not cut_types:
        return
    whole, found = read(model, files, types), read(part.model, cut, cut_types)
    for key, kind in cut_types.items():
        of_whole = part.slices[key]
        if of_whole.key not in types:
            # Its inputs are no whole blocks, and those of a part may be.
            continue
        assert types[of_whole.key] == kind
        packed = PACKED_TYPES[kind]
        in_bytes = joined(
            range(*(-(-place // packed.block_inputs) * packed.block_bytes for place in (each.start, each.stop)))
            for each in of_whole.columns
        )
        expected = taken(whole[of_whole.key], of_whole.rows, in_bytes)
        if of_whole.columns and expected.shape == found[key].shape:
            # The last block may have had more inputs.
            inputs = sum(map(len, of_whole.columns)) // packed.block_inputs * packed.block_bytes
            assert torch.equal(found[key][:, :inputs], expected[:, :inputs]), key
        else:
            assert torch.equal(found[key], expected), key


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_shards_have_their_part_of_the_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(weight_reader, "_PIECE_BYTES", 20_000)
    folder = CHECKPOINTS[name](tmp_path)
    model = read_model(folder)
    files = find_weights(folder, model)
    whole = read(model, files)
    formats = matrix_formats(packed_types(files), "bfloat16")
    for layout, least_bytes in zip(LAYOUTS, (1, 1 << 20), strict=True):
        monkeypatch.setattr(weight_reader, "_LEAST_BYTES", least_bytes)
        for rank in range(layout.num_ranks):
            part = shard_of(model, layout, layout.place_of(rank), formats).part
            check_values(whole, part, files)
            check_blocks(model, part, files)


@pytest.mark.parametrize("name", ["biases", *FORMATS])
def test_any_rows_and_columns_can_be_taken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they end in the middle of codes, too."""
    folder = CHECKPOINTS[name](tmp_path)
    model = read_model(folder)
    files = find_weights(folder, model)
    whole = read(model, files)
    rng = random.Random(2)
    for least_bytes in (1, 512):
        monkeypatch.setattr(weight_reader, "_LEAST_BYTES", least_bytes)
        slices = random_slices(model, rng)
        found: dict[WeightKey, list[Tensor]] = {}
        for key, _, values in read_pieces(cut_weights(files, slices)):
            found.setdefault(key, []).append(values.clone().float())
        assert found.keys() == slices.keys()
        for key, pieces in found.items():
            assert torch.equal(torch.cat(pieces), taken(whole[key], *slices[key][1:])), key


def random_slices(model: ModelSpec, rng: random.Random) -> Slices:
    def some(count: int) -> Ranges:
        ends = sorted(rng.sample(range(count + 1), 4))
        return joined((range(ends[0], ends[1]), range(ends[2], ends[3])))

    return {
        key: Slice(key, some(shape[0]), some(shape[1]) if key.name in ("output", "down") and len(shape) > 1 else ())
        for key, shape in model_weights(model).items()
        if rng.random() < 0.8 and key.name != "query_norm"
    }


def test_only_what_is_wanted_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but norms and what is read with columns that are too few to be read alone."""
    folder = plain("LlamaForCausalLM", hidden_size=256, intermediate_size=1024, num_attention_heads=8)(tmp_path)
    model = read_model(folder)

    def num_bytes(part: ModelPart | None) -> int:
        told: list[int] = []
        for _ in read_pieces(find_checkpoint(folder, part)[1], lambda _, total: told.append(total)):
            pass
        return told[-1]

    all_bytes = num_bytes(None)
    halves = [num_bytes(shard_of(model, layout, layout.place_of(0)).part) for layout in (Layout(2), Layout(1, 2))]
    output_bytes = model.num_layers * 256 * 256 * 4
    assert all_bytes / 2 <= halves[0] < all_bytes / 2 + output_bytes
    assert halves[1] < 0.6 * all_bytes
    monkeypatch.setattr(weight_reader, "_LEAST_BYTES", 1)
    assert num_bytes(shard_of(model, Layout(2), Layout(2).place_of(1)).part) <= 0.51 * all_bytes
