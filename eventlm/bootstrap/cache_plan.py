"""How many KV blocks each replica gets, and how long a context they allow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eventlm.bootstrap.cache_sizes import block_bytes, mebibytes, num_blocks_needed, weights_bytes
from eventlm.bootstrap.free_memory import free_bytes, total_bytes
from eventlm.bootstrap.gpu_memory import check_cache_fits, check_sequence_fits
from eventlm.bootstrap.gpus import INTERPRETER, Gpu
from eventlm.config import Config
from eventlm.config.core import most_blocks
from eventlm.config.sizes import memory_bytes
from eventlm.errors import UsageError
from eventlm.models.config import DecoderConfig, longest_context, read_config, resolve_dtype, resolve_kv_dtype
from eventlm.types import ceil_div
from eventlm.worker.protocol import FAKE_MODEL

#: The fake model stores no keys and values; these are what a small real one would have.
FAKE_NUM_BLOCKS = 4096
FAKE_MAX_MODEL_LEN = 8192

#: With `kv_memory` auto: this share of what the weights leave free, for all replicas together, and at most so much for
#: each.
AUTO_DIVISOR = 4
MAX_AUTO_BYTES = 4 << 30


class CachePlan(NamedTuple):
    """`num_blocks` for each replica, the context in tokens, and what the user should be told.

    num_blocks 0: the workers find out how many there is room for, and the context may have to be cut.
    """

    num_blocks: int
    max_model_len: int
    warnings: list[str]


def check_kv_memory(config: Config, gpus: Sequence[Gpu] = (), *, all_bytes: int | None = None) -> None:
    """Whether there is the memory that `--kv-memory` asks for, if nothing else were in it; needs no model.

    `all_bytes` is what the machine has, which is asked if it is not given. Raises UsageError.
    """
    cache = config.cache
    if config.model.model == FAKE_MODEL or cache.kv_memory == "auto" or cache.num_blocks:
        return
    num_bytes, given = memory_bytes(cache.kv_memory), f"--kv-memory {cache.kv_memory}"
    if gpus:
        check_cache_fits(config, gpus, cache_bytes=num_bytes, given=given)
    else:
        _check_against_all(config, num_bytes, given, all_bytes)


def plan_cache(
    config: Config,
    folder: Path | None,
    gpus: Sequence[Gpu] = (),
    *,
    available_bytes: int | None = None,
    all_bytes: int | None = None,
) -> CachePlan:
    """Size the KV cache for the checkpoint in `folder` (None: the fake model), which runs on `gpus` if there are any.

    `available_bytes` is what the machine has free and `all_bytes` what it has, which are asked if they are not given.
    Without `max_model_len` the context is the model's own, cut to what the cache holds (one block less than there are).
    Raises UsageError where a longer context was asked for, or the weights or the blocks that were asked for do not fit
    into memory or are more than an engine can have, and CheckpointError.
    """
    decoder = read_config(folder) if folder is not None else None
    asked = config.model.max_model_len
    longest = longest_context(decoder) if decoder else FAKE_MAX_MODEL_LEN
    if decoder and asked > longest:
        raise UsageError(f"--max-model-len {asked} is longer than the {longest} tokens that the model was made for")
    if decoder:
        dtype = resolve_dtype(decoder, config.model.dtype, config.model.quantization)
        resolve_kv_dtype(decoder, dtype, config.cache.kv_cache_dtype)
    if folder and decoder and gpus:
        num_blocks, warnings = _plan_on_gpus(config, folder, decoder, gpus)
        if not num_blocks:
            return CachePlan(0, asked or longest, warnings)
    else:
        num_blocks, warnings = _plan_in_memory(config, folder, decoder, available_bytes, all_bytes)
    num_blocks, cut = _within_limit(config, num_blocks)
    warnings = [*warnings, *cut]
    capacity = (num_blocks - 1) * config.cache.block_size
    if capacity < max(asked, 1):
        raise _too_small(config, decoder, num_blocks)
    max_model_len = asked or min(longest, capacity)
    if max_model_len < (asked or longest):
        too_few = "--num-blocks" if config.cache.num_blocks or decoder is None else "--kv-memory"
        warnings.append(
            f"the context is cut from {longest} to {max_model_len} tokens, which {num_blocks} KV blocks hold; "
            f"raise {too_few} for more"
        )
    return CachePlan(num_blocks, max_model_len, warnings)


def _within_limit(config: Config, num_blocks: int) -> tuple[int, list[str]]:
    """As many of the blocks as an engine can have, and warnings. Raises UsageError where more were asked for."""
    num_replicas = config.scheduler.replicas
    most = most_blocks(num_replicas)
    if num_blocks <= most:
        return num_blocks, []
    limit = f"{most:,} for each of {num_replicas} replicas" if num_replicas > 1 else f"{most:,}"
    if config.cache.num_blocks:
        raise UsageError(
            f"--num-blocks {num_blocks}: an engine can have at most {limit}; lower it, and raise --block-size for "
            "the same memory"
        )
    warning = (
        f"there is memory for {num_blocks:,} KV blocks of each replica, and an engine can have at most {limit}: the "
        "rest stays free; raise --block-size to use it"
    )
    return most, [warning]


def _plan_on_gpus(config: Config, folder: Path, decoder: DecoderConfig, gpus: Sequence[Gpu]) -> tuple[int, list[str]]:
    """Blocks of each replica, 0 if nobody said how many and the workers can measure, and warnings."""
    warnings = check_sequence_fits(config, folder, decoder, gpus)
    cache, size = config.cache, block_bytes(config, decoder)
    given, num_blocks = f"--num-blocks {cache.num_blocks}", cache.num_blocks
    if not num_blocks:
        if cache.kv_memory == "auto":
            if gpus[0].name == INTERPRETER:
                raise UsageError(
                    "--device cuda with TRITON_INTERPRET=1 computes on the processor, in a GPU's place: there is no "
                    "GPU memory to measure for the KV cache; say how large it shall be, with --num-blocks or "
                    "--kv-memory, or unset TRITON_INTERPRET to compute on a GPU"
                )
            return 0, warnings
        given, num_blocks = f"--kv-memory {cache.kv_memory}", memory_bytes(cache.kv_memory) // size
    weights = weights_bytes(config, decoder)
    return num_blocks, check_cache_fits(config, gpus, cache_bytes=num_blocks * size, weights=weights, given=given)


def _plan_in_memory(
    config: Config,
    folder: Path | None,
    decoder: DecoderConfig | None,
    available_bytes: int | None,
    all_bytes: int | None,
) -> tuple[int, list[str]]:
    """Blocks of each replica, and warnings."""
    left_bytes = _left_by_weights(config, folder, decoder, available_bytes) if folder and decoder else 0
    num_blocks = config.cache.num_blocks or _blocks_in_memory(config, decoder, left_bytes)
    if decoder and config.cache.num_blocks:
        _check_against_all(config, num_blocks * block_bytes(config, decoder), f"--num-blocks {num_blocks}", all_bytes)
    return num_blocks, _warn_of_overcommitment(config, decoder, num_blocks, left_bytes)


def _too_small(config: Config, decoder: DecoderConfig | None, num_blocks: int) -> UsageError:
    """What is too little, how much is needed, and what to do."""
    cache, asked = config.cache, config.model.max_model_len
    needed = num_blocks_needed(config)
    wish = f"a context of {asked:,} tokens" if asked else "even the shortest context"
    remedy = ", or lower --max-model-len" if asked else ""
    if cache.num_blocks or decoder is None:
        return UsageError(
            f"too few KV blocks: {wish} needs {needed:,} of {cache.block_size} tokens, there are {num_blocks:,}; "
            f"raise --num-blocks{remedy}"
        )
    size = block_bytes(config, decoder)
    kib = ceil_div(needed * size, 1024)
    have = "the memory that is free" if cache.kv_memory == "auto" else f"--kv-memory {cache.kv_memory}"
    return UsageError(
        f"{have} is too little: {wish} needs {needed:,} KV blocks of {size:,} bytes for each replica; "
        f"give --kv-memory {kib}KiB or more{remedy}"
    )


def _left_by_weights(config: Config, folder: Path, decoder: DecoderConfig, available_bytes: int | None) -> int:
    """Free memory that the weights of all replicas leave. UsageError unless each gets a sequence into it."""
    available = free_bytes() if available_bytes is None else available_bytes
    num_replicas = config.scheduler.replicas
    weights = weights_bytes(config, decoder)
    least = num_blocks_needed(config) * block_bytes(config, decoder)
    if num_replicas * (weights + least) > available:
        of_each = f" for each of {num_replicas} replicas" if num_replicas > 1 else ""
        remedy = "lower --replicas, " if num_replicas > 1 else ""
        remedy += "lower --max-model-len, " if config.model.max_model_len else ""
        raise UsageError(
            f"{folder}: its weights take {mebibytes(weights)}{of_each}, the KV cache of one sequence "
            f"{mebibytes(least)}, and {mebibytes(available)} of memory are free; {remedy}take a smaller model, or "
            "end other programs"
        )
    return available - num_replicas * weights


def _check_against_all(config: Config, cache_bytes: int, given: str, all_bytes: int | None) -> None:
    """Whether all of memory would hold a cache of so many bytes for each replica. UsageError if not."""
    there = total_bytes() if all_bytes is None else all_bytes
    num_replicas = config.scheduler.replicas
    if num_replicas * cache_bytes > there:
        asked_for = f"a KV cache of {mebibytes(cache_bytes)} is"
        if num_replicas > 1:
            asked_for = (
                f"KV caches of {mebibytes(num_replicas * cache_bytes)} for {num_replicas} replicas "
                f"({mebibytes(cache_bytes)} each) are"
            )
        raise UsageError(
            f"{given}: {asked_for} more than all the memory here, which is {mebibytes(there)}; give less, or leave it "
            "out for what fits"
        )


def _warn_of_overcommitment(
    config: Config, decoder: DecoderConfig | None, num_blocks: int, left_bytes: int
) -> list[str]:
    if decoder is None:
        return []
    cache_bytes = config.scheduler.replicas * num_blocks * block_bytes(config, decoder)
    if cache_bytes <= left_bytes:
        return []
    return [
        f"the KV cache may grow to {mebibytes(cache_bytes)}, and the weights leave {mebibytes(left_bytes)} of the "
        "memory that is free; when it is full the system may end a worker; lower --kv-memory or --num-blocks"
    ]


def _blocks_in_memory(config: Config, decoder: DecoderConfig | None, left_bytes: int) -> int:
    if decoder is None:
        return FAKE_NUM_BLOCKS
    wish = config.cache.kv_memory
    share = left_bytes // AUTO_DIVISOR // config.scheduler.replicas
    return (min(share, MAX_AUTO_BYTES) if wish == "auto" else memory_bytes(wish)) // block_bytes(config, decoder)
