"""How many KV blocks each replica gets, and how long a context they allow."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from eventlm.compose.free_memory import free_bytes, total_bytes
from eventlm.config import Config
from eventlm.config.sizes import memory_bytes
from eventlm.errors import UsageError
from eventlm.models.checkpoint_weights import weight_bytes
from eventlm.models.config import DecoderConfig, kv_bytes_per_token, read_config, resolve_dtype, resolve_kv_dtype
from eventlm.worker.protocol import FAKE_MODEL

#: The fake model stores no keys and values; these are what a small real one would have.
FAKE_NUM_BLOCKS = 4096
FAKE_MAX_MODEL_LEN = 8192

#: With `kv_memory` auto: this share of what the weights leave free, for all replicas together, and at most so much for
#: each.
AUTO_DIVISOR = 4
MAX_AUTO_BYTES = 4 << 30


class CachePlan(NamedTuple):
    """`num_blocks` for each replica, the context in tokens, and what the user should be told."""

    num_blocks: int
    max_model_len: int
    warnings: list[str]


def check_kv_memory(config: Config, *, all_bytes: int | None = None) -> None:
    """Whether the machine has the memory that `--kv-memory` asks for, if nothing else were in it; needs no model.

    `all_bytes` is what the machine has, which is asked if it is not given. Raises UsageError.
    """
    cache = config.cache
    if config.model.model != FAKE_MODEL and cache.kv_memory != "auto" and not cache.num_blocks:
        _check_against_all(config, memory_bytes(cache.kv_memory), f"--kv-memory {cache.kv_memory}", all_bytes)


def plan_cache(
    config: Config, folder: Path | None, *, available_bytes: int | None = None, all_bytes: int | None = None
) -> CachePlan:
    """Size the KV cache for the checkpoint in `folder` (None: the fake model).

    `available_bytes` is what the machine has free and `all_bytes` what it has, which are asked if they are not given.
    Without `max_model_len` the context is the model's own, cut to what the cache holds (one block less than there are).
    Raises UsageError where a longer context was asked for, or the weights or the blocks that were asked for do not fit
    into memory, and CheckpointError.
    """
    decoder = read_config(folder) if folder is not None else None
    asked = config.model.max_model_len
    longest = decoder.max_position_embeddings if decoder else FAKE_MAX_MODEL_LEN
    if decoder and asked > longest:
        raise UsageError(f"--max-model-len {asked} is longer than the {longest} tokens that the model was made for")
    if decoder:
        dtype = resolve_dtype(decoder, config.model.dtype, config.model.quantization)
        resolve_kv_dtype(decoder, dtype, config.cache.kv_cache_dtype)
    left_bytes = _left_by_weights(config, folder, decoder, available_bytes) if folder and decoder else 0
    num_blocks = config.cache.num_blocks or _blocks_in_memory(config, decoder, left_bytes)
    if decoder and config.cache.num_blocks:
        _check_against_all(config, num_blocks * _block_bytes(config, decoder), f"--num-blocks {num_blocks}", all_bytes)
    capacity = (num_blocks - 1) * config.cache.block_size
    if capacity < max(asked, 1):
        raise _too_small(config, decoder, num_blocks)
    max_model_len = asked or min(longest, capacity)
    warnings = _warn_of_overcommitment(config, decoder, num_blocks, left_bytes)
    if max_model_len < (asked or longest):
        too_few = "--num-blocks" if config.cache.num_blocks or decoder is None else "--kv-memory"
        warnings.append(
            f"the context is cut from {longest} to {max_model_len} tokens, which {num_blocks} KV blocks hold; "
            f"raise {too_few} for more"
        )
    return CachePlan(num_blocks, max_model_len, warnings)


def _too_small(config: Config, decoder: DecoderConfig | None, num_blocks: int) -> UsageError:
    """What is too little, how much is needed, and what to do."""
    cache, asked = config.cache, config.model.max_model_len
    needed = _num_blocks_needed(config)
    wish = f"a context of {asked:,} tokens" if asked else "even the shortest context"
    remedy = ", or lower --max-model-len" if asked else ""
    if cache.num_blocks or decoder is None:
        return UsageError(
            f"too few KV blocks: {wish} needs {needed:,} of {cache.block_size} tokens, there are {num_blocks:,}; "
            f"raise --num-blocks{remedy}"
        )
    block_bytes = _block_bytes(config, decoder)
    kib = -(-needed * block_bytes // 1024)
    have = "the memory that is free" if cache.kv_memory == "auto" else f"--kv-memory {cache.kv_memory}"
    return UsageError(
        f"{have} is too little: {wish} needs {needed:,} KV blocks of {block_bytes:,} bytes for each replica; "
        f"give --kv-memory {kib}KiB or more{remedy}"
    )


def _left_by_weights(config: Config, folder: Path, decoder: DecoderConfig, available_bytes: int | None) -> int:
    """Free memory that the weights of all replicas leave. UsageError unless each gets a sequence into it."""
    available = free_bytes() if available_bytes is None else available_bytes
    num_replicas = config.scheduler.replicas
    model = config.model
    dtype = resolve_dtype(decoder, model.dtype, model.quantization)
    weights = weight_bytes(decoder, dtype, model.quantization)
    least = _num_blocks_needed(config) * _block_bytes(config, decoder)
    if num_replicas * (weights + least) > available:
        of_each = f" for each of {num_replicas} replicas" if num_replicas > 1 else ""
        remedy = "lower --replicas, " if num_replicas > 1 else ""
        remedy += "lower --max-model-len, " if config.model.max_model_len else ""
        raise UsageError(
            f"{folder}: its weights take {_mebibytes(weights)}{of_each}, the KV cache of one sequence "
            f"{_mebibytes(least)}, and {_mebibytes(available)} of memory are free; {remedy}take a smaller model, or "
            "end other programs"
        )
    return available - num_replicas * weights


def _check_against_all(config: Config, cache_bytes: int, given: str, all_bytes: int | None) -> None:
    """Whether all of memory would hold a cache of so many bytes for each replica. UsageError if not."""
    there = total_bytes() if all_bytes is None else all_bytes
    num_replicas = config.scheduler.replicas
    if num_replicas * cache_bytes > there:
        asked_for = f"a KV cache of {_mebibytes(cache_bytes)} is"
        if num_replicas > 1:
            asked_for = (
                f"KV caches of {_mebibytes(num_replicas * cache_bytes)} for {num_replicas} replicas "
                f"({_mebibytes(cache_bytes)} each) are"
            )
        raise UsageError(
            f"{given}: {asked_for} more than all the memory here, which is {_mebibytes(there)}; give less, or leave it "
            "out for what fits"
        )


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes >> 20:,} MiB" if num_bytes >= 1 << 20 else f"{num_bytes:,} bytes"


def _warn_of_overcommitment(
    config: Config, decoder: DecoderConfig | None, num_blocks: int, left_bytes: int
) -> list[str]:
    if decoder is None:
        return []
    cache_bytes = config.scheduler.replicas * num_blocks * _block_bytes(config, decoder)
    if cache_bytes <= left_bytes:
        return []
    return [
        f"the KV cache may grow to {_mebibytes(cache_bytes)}, and the weights leave {_mebibytes(left_bytes)} of the "
        "memory that is free; when it is full the system may end a worker; lower --kv-memory or --num-blocks"
    ]


def _blocks_in_memory(config: Config, decoder: DecoderConfig | None, left_bytes: int) -> int:
    if decoder is None:
        return FAKE_NUM_BLOCKS
    wish = config.cache.kv_memory
    share = left_bytes // AUTO_DIVISOR // config.scheduler.replicas
    return (min(share, MAX_AUTO_BYTES) if wish == "auto" else memory_bytes(wish)) // _block_bytes(config, decoder)


def _num_blocks_needed(config: Config) -> int:
    """For the context that was asked for, else for the shortest."""
    return -(-max(config.model.max_model_len, 1) // config.cache.block_size) + 1


def _block_bytes(config: Config, decoder: DecoderConfig) -> int:
    dtype = resolve_dtype(decoder, config.model.dtype, config.model.quantization)
    kv_dtype = resolve_kv_dtype(decoder, dtype, config.cache.kv_cache_dtype)
    return config.cache.block_size * kv_bytes_per_token(decoder, kv_dtype)
