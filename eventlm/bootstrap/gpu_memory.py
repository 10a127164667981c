"""Whether GPUs have the memory for weights and KV caches.

How many blocks fit beside activations is for the workers to find out, which measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eventlm.bootstrap.cache_sizes import block_bytes, mebibytes, num_blocks_needed, weights_bytes
from eventlm.bootstrap.gpus import Gpu
from eventlm.config import Config
from eventlm.errors import UsageError
from eventlm.models.config import DecoderConfig


def check_sequence_fits(config: Config, folder: Path, decoder: DecoderConfig, gpus: Sequence[Gpu]) -> list[str]:
    """Whether each replica gets its weights and one sequence into its share of its GPU; what the user should be told.

    Raises UsageError with the figures.
    """
    model, weights = config.model, weights_bytes(config, decoder)
    least = num_blocks_needed(config) * block_bytes(config, decoder)
    flag = f"--gpu-memory-utilization {config.gpu.gpu_memory_utilization}"
    warnings = []
    for gpu, num_replicas in _shared(gpus, config.scheduler.replicas):
        of_each = f" for each of {num_replicas} replicas" if num_replicas > 1 else ""
        takes = f"{folder}: its weights take {mebibytes(weights)}{of_each}, the KV cache of one sequence"
        takes += f" {mebibytes(least)}"
        remedy = "lower --replicas, " if num_replicas > 1 else ""
        remedy += "lower --max-model-len, " if model.max_model_len else ""
        needed = num_replicas * (weights + least)
        allowed = gpu.total_bytes * config.gpu.memory_ppm // 1_000_000
        if needed > allowed:
            raise UsageError(
                f"{takes}, and {flag} allows {mebibytes(allowed)} of the {mebibytes(gpu.total_bytes)} of {_name(gpu)}"
                f"; {'raise it, ' if needed <= gpu.total_bytes else ''}{remedy}or take a smaller model"
            )
        if needed > gpu.free_bytes:
            raise UsageError(
                f"{takes}, and of the {mebibytes(gpu.total_bytes)} of {_name(gpu)} {mebibytes(gpu.free_bytes)} are "
                f"free; {remedy}end other programs on it, which `nvidia-smi` lists, or take a smaller model"
            )
        if allowed > gpu.free_bytes:
            warnings.append(
                f"other programs hold memory of {_name(gpu)}: {flag} allows {mebibytes(allowed)}, and "
                f"{mebibytes(gpu.free_bytes)} are free, so the KV cache will be smaller"
            )
    return warnings


def check_cache_fits(
    config: Config, gpus: Sequence[Gpu], *, cache_bytes: int, weights: int = 0, given: str
) -> list[str]:
    """Whether the GPUs have the memory for KV caches of so many bytes a replica, which `given` asked for, and for
    weights of so many; what the user should be told. Raises UsageError.
    """
    warnings = []
    for gpu, num_replicas in _shared(gpus, config.scheduler.replicas):
        of_each = f" for each of {num_replicas} replicas" if num_replicas > 1 else ""
        beside = f" beside weights of {mebibytes(weights)}" if weights else ""
        takes = f"{given}: a KV cache of {mebibytes(cache_bytes)}{beside}{of_each} is more than"
        needed = num_replicas * (cache_bytes + weights)
        if needed > gpu.total_bytes:
            raise UsageError(
                f"{takes} all the memory of {_name(gpu)}, which is {mebibytes(gpu.total_bytes)}; give less, or leave "
                "it out for what fits"
            )
        if needed > gpu.free_bytes:
            warnings.append(f"{takes} is free on {_name(gpu)}, {mebibytes(gpu.free_bytes)}; its worker may not start")
    return warnings


def _shared(gpus: Sequence[Gpu], num_replicas: int) -> list[tuple[Gpu, int]]:
    """The GPUs that replicas are on, which they take in turn, and how many are on each."""
    return [(gpu, len(range(place, num_replicas, len(gpus)))) for place, gpu in enumerate(gpus[:num_replicas])]


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.number} ({gpu.name})"
