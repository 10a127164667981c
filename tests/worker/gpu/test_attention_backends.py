"""Which attention backend is chosen, and that each computes the same."""

from __future__ import annotations

import importlib.machinery
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from eventlm.errors import UsageError
from eventlm.kernels.paged_attention import AttentionRow, paged_attention, plan_attention
from eventlm.models.spec import AttentionSpec, RopeSpec
from eventlm.worker.gpu import attention_backends
from eventlm.worker.gpu.attention import AttentionRows, Geometry
from eventlm.worker.gpu.attention_backends import choose_backend
from eventlm.worker.gpu.triton_attention import TritonAttention
from eventlm.worker.protocol import GPU_BACKEND_GROUP
from tests.worker.gpu.driven import BUCKETS, Asked, Driven, gpu_runner, small_checkpoint
from tests.worker.gpu.test_runner import GREEDY, greedy, prompt_of

ATTENTION = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32, rope=RopeSpec(rotary_dim=32), scale=0.2)
GEOMETRY = Geometry(
    attentions={0: ATTENTION},
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    block_size=256,
    max_rows=8,
    max_context=512,
    dtype=torch.bfloat16,
    kv_dtype="bfloat16",
    device=torch.device("cpu"),
    is_invariant=False,
)


def test_the_fastest_is_taken_and_the_reason_is_logged() -> None:
    choice = choose_backend("auto", GEOMETRY)
    assert choice.backend is TritonAttention
    assert choice.reason


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("flash_attn", {}, "flash-attn is not installed"),
        ("flash_attn", {"block_size": 16}, "multiple of 256 tokens, not 16"),
        ("flash_attn", {"kv_dtype": "fp8"}, "keys and values are fp8"),
        ("flash_attn", {"is_invariant": True}, "--batch-invariant"),
        ("flash_attn", {"attentions": {0: ATTENTION, 1: structs.replace(ATTENTION, window=9)}}, "windows"),
        ("torch_sdpa", {"kv_dtype": "fp8"}, "fp8"),
        ("torch_sdpa", {"is_invariant": True}, "--batch-invariant"),
    ],
)
def test_one_that_cannot_run_the_model_gives_the_reason(name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        choose_backend(name, GEOMETRY._replace(**changes))


def test_an_unknown_one_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="auto, triton, flash_attn, torch_sdpa"):
        choose_backend("flashinfer", GEOMETRY)


def test_a_package_can_bring_one(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", f"{__name__}:TritonAttention", GPU_BACKEND_GROUP)
    broken = EntryPoint("broken", f"{__name__}:Nothing", GPU_BACKEND_GROUP)
    monkeypatch.setattr(attention_backends, "entry_points", lambda group: [point, broken])
    assert choose_backend("mine", GEOMETRY).backend is TritonAttention
    with pytest.raises(UsageError, match="broken cannot be loaded: AttributeError"):
        choose_backend("broken", GEOMETRY)


class Cache(NamedTuple):
    """All that is asked of one before a step."""

    num_blocks: int


def test_how_contexts_are_split_depends_on_what_the_cache_holds() -> None:
    nothing = torch.zeros(1, dtype=torch.int32)
    step = AttentionRows([], 1, torch.zeros(1, 1, dtype=torch.int32), nothing, nothing, nothing)

    def splits(max_context: int, num_blocks: int) -> int:
        attention = TritonAttention(GEOMETRY._replace(max_context=max_context))
        attention.begin(Cache(num_blocks), step)  # type: ignore[arg-type]
        return attention._num_splits

    # With room for two blocks of 256 tokens, one of which is no sequence's.
    assert splits(4096, 2) == splits(256, 2) < splits(4096, 17)


class FlashAttnPackage(ModuleType):
    """What the package's two functions compute, by their documentation, in float32."""

    def __init__(self) -> None:
        super().__init__("flash_attn")
        self.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float,
        causal: bool,
    ) -> Tensor:
        assert causal
        rows = [
            (length - 1, 1, table)
            for length, table in zip(cache_seqlens.tolist(), block_table.cpu().numpy(), strict=True)
            if length
        ]
        out = torch.zeros_like(q)
        out[: len(rows), 0] = _attend(q[: len(rows), 0], k_cache, v_cache, rows, softmax_scale)
        return out

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        block_table: Tensor,
    ) -> Tensor:
        assert causal
        counts, lengths = cu_seqlens_q.diff(), cu_seqlens_k.diff()
        assert (int(counts.max()), int(lengths.max())) == (max_seqlen_q, max_seqlen_k)
        starts = (lengths - counts).tolist()
        tables = block_table.cpu().numpy()
        return _attend(q, k, v, list(zip(starts, counts.tolist(), tables, strict=True)), softmax_scale)


def _attend(q: Tensor, k: Tensor, v: Tensor, rows: list[tuple[int, int, np.ndarray]], scale: float) -> Tensor:
    cache = torch.stack((k, v)).transpose(2, 3).contiguous().cpu()
    groups = plan_attention([AttentionRow(*row) for row in rows], cache, q.dtype)
    return paged_attention(q.contiguous().cpu(), cache, groups, scale=scale).to(q.device)


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    from eventlm.worker.gpu.flash_attention import FlashAttention

    monkeypatch.setitem(sys.modules, "flash_attn", FlashAttnPackage())
    # The real one computes in half precision only; tokens are compared in full.
    monkeypatch.setattr(FlashAttention, "refusal", classmethod(lambda cls, geometry: ""))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.usefixtures("flash_attn")
@pytest.mark.parametrize("backend", ["flash_attn", "torch_sdpa"])
def test_others_give_the_tokens_of_transformers(folder: Path, backend: str) -> None:
    asked = [Asked(prompt_of(5), 6, GREEDY), Asked(prompt_of(40), 4, GREEDY)]
    # What stands for flash-attn computes on the host, where nothing can be captured.
    buckets = [] if backend == "flash_attn" else BUCKETS
    runner = gpu_runner(folder, attention_backend=backend, max_num_batched_tokens=32, graph_buckets=buckets)
    driven = Driven(runner, asked)
    for number, (prompt, num_tokens, *_) in enumerate(asked):
        assert driven.outputs[number] == greedy(folder, prompt, num_tokens)
    assert runner.host_info()["attention_backend"] == backend


def test_a_batch_that_must_not_matter_does_not(folder: Path) -> None:
    # In chunks, beside each other, and as decodes.
    asked = [Asked(prompt_of(length), 3, GREEDY) for length in (4, 19)]
    settings = {"batch_invariant": True, "dtype": "bfloat16", "max_num_batched_tokens": 16}
    together = Driven(gpu_runner(folder, **settings), asked).outputs
    for number, each in enumerate(asked):
        assert Driven(gpu_runner(folder, **settings), [each]).outputs[0] == together[number]
