"""How many KV blocks fit beside a model: what a profiling run leaves of the share of the GPU that a worker may take."""

from __future__ import annotations

import gc
from typing import NamedTuple, Protocol

import torch

from eventlm.models.config import kv_bytes_per_token
from eventlm.models.transformers_model import ServedModel
from eventlm.types import ceil_div
from eventlm.worker.cache_engine import CacheMemoryError
from eventlm.worker.gpu.forward import GpuForward
from eventlm.worker.start_report import (
    CAPTURING_GRAPHS,
    COMPILING_KERNELS,
    MEASURING_MEMORY,
    TORCH_COMPILE,
    StartReport,
)
from eventlm.worker.warm_up import MeasuredRunner, Shape, measure, warm_kernels

#: What the driver takes for a process, and the libraries for their own.
CONTEXT_BYTES = 768 << 20
#: Of a graph, where two that were captured on trial show no difference.
_LEAST_GRAPH_BYTES = 2 << 20


class UnsizedRunner(MeasuredRunner, Protocol):
    """A runner on a GPU that has its model and not yet its KV cache."""

    config: ServedModel
    device: torch.device
    forward: GpuForward
    notes: list[str]

    def open_table(self, num_blocks: int) -> None:
        """Begin with a cache of so many empty blocks and no sequences."""
        ...

    def agree(self, num_blocks: int) -> int:
        """KV blocks for which there is room on all ranks that run the same steps, if there is for so many here."""
        ...


class GpuMemory(NamedTuple):
    """Where the memory goes, in bytes except `num_blocks`; activations are known if a profiling run was made."""

    num_blocks: int
    weights: int
    activations: int
    graphs: int
    kv_cache: int


class MeasuredMemory(NamedTuple):
    """Of a GPU with a model in it, in bytes: all its memory, what is free, what this process has taken, what the
    largest step takes beside that, and all graphs.
    """

    total: int
    free: int
    taken: int
    activations: int
    graphs: int


def num_blocks_beside(measured: MeasuredMemory, *, share_ppm: int, block_bytes: int, num_blocks_needed: int) -> int:
    """KV blocks that fit. Raises CacheMemoryError, with the figures, if that are fewer than are needed."""
    share = measured.total * share_ppm // 1_000_000
    left = min(share - measured.taken, measured.free) - measured.activations - measured.graphs
    num_blocks = max(left, 0) // block_bytes
    if num_blocks >= num_blocks_needed:
        return num_blocks
    others = measured.total - measured.free - measured.taken
    used_elsewhere = f", {_mebibytes(others)} are taken by other programs" if others > CONTEXT_BYTES else ""
    raise CacheMemoryError(
        f"the model does not fit into the GPU's memory: of {_mebibytes(measured.total)} the worker may take "
        f"{_mebibytes(share)} (--gpu-memory-utilization){used_elsewhere}; weights and libraries take "
        f"{_mebibytes(measured.taken)}, the largest step {_mebibytes(measured.activations)}, CUDA graphs "
        f"{_mebibytes(measured.graphs)}, and the KV cache needs {_mebibytes(num_blocks_needed * block_bytes)} at the "
        "least; lower --max-model-len, --max-num-batched-tokens or --max-num-seqs, give --no-cuda-graphs or "
        "--kv-cache-dtype fp8, or take a smaller model"
    )


def size_cache(runner: UnsizedRunner, report: StartReport) -> GpuMemory:
    """Give a runner its KV cache and its graphs. The cache is as asked for, else takes what a profiling run leaves."""
    setup, forward = runner.setup, runner.forward
    weights = _taken(runner.device)
    measured, num_blocks = None, setup.num_blocks
    block_bytes = setup.block_size * kv_bytes_per_token(forward.model, forward.kv_dtype)
    if setup.torch_compile:
        # Before anything else runs, or what it compiles would not count.
        report.begin(TORCH_COMPILE)
        runner.open_table(1)
        runner.notes.append(forward.compile_gain())
    if not num_blocks:
        report.begin(MEASURING_MEMORY)
        measured = _measure(runner)
        num_blocks = num_blocks_beside(
            measured,
            share_ppm=setup.gpu_memory_ppm,
            block_bytes=block_bytes,
            num_blocks_needed=ceil_div(min(setup.max_model_len, setup.block_size), setup.block_size) + 1,
        )
    num_blocks = runner.agree(num_blocks)
    runner.open_table(num_blocks)
    if runner.device.type == "cuda":
        report.begin(COMPILING_KERNELS)
        warm_kernels(runner, report.progress)
    if setup.graph_buckets and forward.can_capture:
        report.begin(CAPTURING_GRAPHS)
    graphs = forward.capture(setup.graph_buckets, report.progress)
    activations = measured.activations if measured is not None else 0
    return GpuMemory(num_blocks, weights, activations, graphs, num_blocks * block_bytes)


def _measure(runner: UnsizedRunner) -> MeasuredMemory:
    """Run the largest step, and capture the two largest graphs on trial."""
    setup, device = runner.setup, runner.device
    num_rows = min(setup.max_num_seqs, setup.max_num_batched_tokens)
    num_tokens = min(setup.max_num_batched_tokens // num_rows, setup.max_model_len)
    before = _taken(device)
    runner.open_table(ceil_div(num_tokens, setup.block_size) + 1)
    torch.cuda.reset_peak_memory_stats(device)
    measure(runner, Shape(num_rows, num_tokens, 0))
    activations = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    graphs = graph_bytes(runner)
    # What was on trial goes before the rest is counted.
    runner.forward.resize_cache(0)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MeasuredMemory(total, free, before + CONTEXT_BYTES, activations, graphs)


def graph_bytes(runner: UnsizedRunner) -> int:
    """All graphs, by those of the two largest: the others have their memory in the largest one's."""
    largest = sorted(runner.setup.graph_buckets)[-2:]
    if not largest:
        return 0
    # The first capture has the libraries take what they keep for it: that is no graph's, and is seen in what is free.
    runner.forward.capture(largest)
    one, two = runner.forward.capture(largest[-1:]), runner.forward.capture(largest)
    each = max(two - one, _LEAST_GRAPH_BYTES)
    return one + (len(runner.setup.graph_buckets) - 1) * each


def _taken(device: torch.device) -> int:
    """What this process holds for its tensors, less what it would give back."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device))


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes >> 20:,} MiB"
