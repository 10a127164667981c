"""The parts of a model that ranks on GPUs have compute together what the whole does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eventlm.core.shards import Layout, Place
from eventlm.kernels.gpu.packed_weight import PackedWeight
from eventlm.models.config import read_model
from eventlm.models.experts import Chosen
from eventlm.models.gpu_weights import GpuWeights, load_gpu_weights
from eventlm.models.program import Experts, WeightKey, program_of
from eventlm.models.weights.decoder_weights import model_weights
from eventlm.models.weights.find_weights import find_weights
from eventlm.models.weights.matrix_types import gpu_types, matrix_formats
from eventlm.worker.gpu.device import open_device
from eventlm.worker.gpu.partial_weights import GpuPart, PartialGpuWeights
from eventlm.worker.ranks.shard import Shard, shard_of
from tests.models.families.proof import SMALL, make_checkpoint
from tests.models.quantized.checkpoints import CASES, write_quantized
from tests.worker.ranks.threads import ThreadGroup, on_all

pytestmark = pytest.mark.usefixtures("one_kernel_at_a_time")

NUM_RANKS, NUM_TOKENS = 2, 3
#: Its experts have biases.
MODEL: dict[str, Any] = {
    "vocab_size": 70,
    "num_hidden_layers": 1,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, "GptOssForCausalLM", **SMALL | MODEL)
    return folder


def load(folder: Path, part: GpuPart | None = None) -> GpuWeights:
    return load_gpu_weights(
        folder,
        dtype="float32",
        device=open_device("cuda:0"),
        is_invariant=False,
        part=part.shard.part if part is not None else None,
        make=part.make_weights if part is not None else GpuWeights,
    )


def shards_of(folder: Path) -> list[Shard]:
    """As `read_shards` deals them out."""
    model = read_model(folder)
    formats = matrix_formats(gpu_types(find_weights(folder, model), model), "float32")
    return [shard_of(model, Layout(NUM_RANKS), Place(0, 0, rank), formats) for rank in range(NUM_RANKS)]


def parts_of(folder: Path, shards: list[Shard]) -> list[GpuWeights]:
    group = ThreadGroup(NUM_RANKS)
    exchanges: list[Any] = [SimpleNamespace(rank=rank, gather=group.gather_of(rank)) for rank in range(NUM_RANKS)]
    return [load(folder, GpuPart(*each)) for each in zip(shards, exchanges, strict=True)]


def test_parts_compute_what_the_whole_does(folder: Path) -> None:
    whole, parts = load(folder), parts_of(folder, shards_of(folder))
    assert all(isinstance(part, PartialGpuWeights) for part in parts)
    device, generator = whole.embedding.device, torch.Generator().manual_seed(1)
    x = torch.randn(NUM_TOKENS, SMALL["hidden_size"], generator=generator).to(device)
    token_ids = torch.tensor([0, 69, 40], device=device)
    [experts] = [each for each in program_of(whole.model) if isinstance(each, Experts)]
    shares = torch.rand(NUM_TOKENS, 2, generator=generator)
    chosen = Chosen(torch.tensor([[0, 2], [1, 2], [0, 3]], device=device), shares.to(device))
    for name, arguments in (
        ("embed", (token_ids, 1.0)),
        ("pass_experts", (experts, x, chosen)),
        ("logits", (x,)),
    ):
        found, *others = on_all([partial(getattr(part, name), *arguments) for part in parts])
        assert all(torch.equal(found, other) for other in others)
        torch.testing.assert_close(found, getattr(whole, name)(*arguments), rtol=1e-5, atol=1e-5)


def test_parts_of_packed_matrices_give_the_sum_of_the_whole(tmp_path: Path) -> None:
    write_quantized(tmp_path, CASES["awq"])
    shards = shards_of(tmp_path)
    whole, parts = load(tmp_path), parts_of(tmp_path, shards)
    for name in ("output", "down"):
        matrix = whole.matrix(name, 0)
        assert all(isinstance(each, PackedWeight) for each in (matrix, *(part.matrix(name, 0) for part in parts)))
        key = WeightKey(name, 0, "weight")
        _, num_in = model_weights(whole.model)[key]
        x = torch.randn(NUM_TOKENS, num_in, generator=torch.Generator().manual_seed(1)).to(whole.embedding.device)
        own = [torch.cat([x[:, each] for each in map(_as_slice, shard.slices[key].columns)], dim=1) for shard in shards]
        found, other = on_all(
            [partial(part.multiply_out, name, 0, each) for part, each in zip(parts, own, strict=True)]
        )
        assert torch.equal(found, other)
        torch.testing.assert_close(found, whole.multiply(name, 0, x), rtol=1e-4, atol=1e-4)


def _as_slice(columns: range) -> slice:
    return slice(columns.start, columns.stop)


def test_a_stage_without_other_tensor_ranks_adds_nothing_up(folder: Path) -> None:
    model = read_model(folder)
    shard: Shard = shard_of(model, Layout(1, 1), Place(0, 0, 0))
    assert type(load(folder, GpuPart(shard, None))) is GpuWeights
