"""Compiled decoders of shards of checkpoints compute together what one of the whole does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eventlm.core.shards import Layout
from eventlm.kernels.cpu.decoder import DecoderPeers
from eventlm.kernels.cpu.meeting import slot_bytes_for
from eventlm.kernels.cpu.native import available_builds
from eventlm.models.config import read_model
from eventlm.models.weights.find_weights import find_weights
from eventlm.models.weights.matrix_types import matrix_formats, matrix_types
from eventlm.worker.ranks.shard import Shard, shard_of
from tests.kernels.cpu.decoders import CompiledDecoder, Piece, Shape, relative_error, write_checkpoint
from tests.kernels.cpu.test_meeting import carried, in_threads
from tests.models.families.test_lfm2 import CASES as LFM2
from tests.models.families.test_qwen_next import CASES as QWEN_NEXT
from tests.models.families.test_qwen_next import EXPERTS
from tests.models.quantized.checkpoints import write_gpt_oss
from tests.models.weights.test_cut_weights import of_gguf, other, plain, quantized

pytestmark = pytest.mark.skipif(not available_builds(), reason="no build of the forward pass is compiled")
SEQUENCE = torch.randint(0, 150, (37,), generator=torch.Generator().manual_seed(4)).tolist()
STEPS = [[Piece(0, 0, 30)], [Piece(0, 30, 31)], [Piece(0, 31, 37)]]
CHECKPOINTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "3 heads of keys": (lambda folder: write_checkpoint(folder, Shape(num_heads=9, num_kv_heads=3)), "none"),
    "tied, with biases": (
        lambda folder: write_checkpoint(
            folder, Shape(num_heads=6, num_kv_heads=3, tied=True, attention_bias=True, mlp_bias=True)
        ),
        "none",
    ),
    "norms of heads": (lambda folder: write_checkpoint(folder, Shape(qk_norm=True)), "none"),
    "experts": (plain("Qwen3MoeForCausalLM", **EXPERTS), "none"),
    "convolutions": (plain(**LFM2["lfm2"]), "none"),
    "delta rule": (plain(**QWEN_NEXT["qwen3-next"]), "none"),
    "int4": (lambda folder: write_checkpoint(folder, Shape(hidden=128, inner=320)), "int4"),
    "llama.cpp": (
        of_gguf("llama", "Q8_0", architecture="LlamaForCausalLM", hidden_size=96, num_attention_heads=6),
        "none",
    ),
    "awq": (quantized("awq"), "none"),
    "gptq, groups in an order": (quantized("gptq, groups in an order"), "none"),
    "fp8 by block": (quantized("fp8 by block"), "none"),
    "gpt-oss": (other(write_gpt_oss), "none"),
}


def shards_in(folder: Path, layout: Layout, quantization: str) -> list[Shard]:
    model = read_model(folder)
    types = matrix_types(find_weights(folder, model), model, quantization)
    formats = matrix_formats(types, "bfloat16", quantization)
    return [shard_of(model, layout, layout.place_of(rank), formats) for rank in range(layout.num_ranks)]


def logits_of(decoders: list[CompiledDecoder], residuals: list[Tensor] | None, *, is_last: bool) -> list[Tensor]:
    """Of each step, or if it is not the last stage the residual stream. All have the same bits."""
    tables = [[3, 1, 2]]

    def run(decoder: CompiledDecoder) -> list[Tensor]:
        streams = [
            decoder.step([SEQUENCE], tables, pieces, None if residuals is None else residuals[number])
            for number, pieces in enumerate(STEPS)
        ]
        return [decoder.decoder.logits(stream) for stream in streams] if is_last else streams

    found: list[Any] = in_threads(decoders, run)
    for each in found:
        if isinstance(each, Exception):
            raise each
        assert all(torch.equal(one, first) for one, first in zip(each, found[0], strict=True))
    return list(found[0])


def logits_of_shards(folder: Path, layout: Layout, quantization: str) -> list[Tensor]:
    """Of each step, by all stages."""
    build = available_builds()[0]
    shards, residuals = shards_in(folder, layout, quantization), None
    hidden_size, vocab_size = shards[0].model.hidden_size, shards[0].vocab_starts[-1]
    for stage in range(layout.stages):
        groups = carried(layout.tensor, slot_bytes_for(64, hidden_size, vocab_size))
        decoders = [
            CompiledDecoder(
                folder,
                build,
                quantization=quantization,
                part=shards[rank].part,
                peers=DecoderPeers(group, shards[rank].vocab_starts),
            )
            for rank, group in zip(layout.ranks_of_stage(stage), groups, strict=True)
        ]
        residuals = logits_of(decoders, residuals, is_last=stage == layout.stages - 1)
    assert residuals is not None
    return residuals


@pytest.mark.parametrize("layout", [Layout(2), Layout(2, 2)])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_shards_give_what_the_whole_does(
    name: str, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))
    write, quantization = CHECKPOINTS[name]
    folder, build = write(tmp_path), available_builds()[0]
    expected = logits_of([CompiledDecoder(folder, build, quantization=quantization)], None, is_last=True)
    found = logits_of_shards(folder, layout, quantization)
    # Heads here are no whole blocks of codes, so that inputs of a product stay what they are in place of codes.
    bound = 0.05 if name in ("llama.cpp", "awq") else 0.01
    assert 0 <= relative_error(torch.cat(found), torch.cat(expected)) < bound


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_stages_have_the_bits_of_the_whole(quantization: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, Shape(hidden=128, inner=320, tied=True))
    expected = logits_of(
        [CompiledDecoder(folder, available_builds()[0], quantization=quantization)], None, is_last=True
    )
    assert torch.equal(torch.cat(logits_of_shards(folder, Layout(1, 2), quantization)), torch.cat(expected))
