"""How many KV blocks each replica gets, and how long a context they allow."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from eventlm.config import CacheConfig, Config
from eventlm.config.sizes import memory_bytes
from eventlm.errors import UsageError
from eventlm.models.config import DecoderConfig, kv_bytes_per_token, read_config, resolve_dtype

#: The fake model stores no keys and values; these are what a small real one would have.
FAKE_NUM_BLOCKS = 4096
FAKE_MAX_MODEL_LEN = 8192

#: With `kv_memory` auto: this share of what is free, for all replicas together, and at most so much for each.
AUTO_DIVISOR = 4
MAX_AUTO_BYTES = 4 << 30


class CachePlan(NamedTuple):
    """`num_blocks` for each replica, the context in tokens, and what the user should be told."""

    num_blocks: int
    max_model_len: int
    warnings: list[str]


def plan_cache(config: Config, folder: Path | None, *, available_bytes: int | None = None) -> CachePlan:
    """Size the KV cache for the checkpoint in `folder` (None: the fake model).

    `available_bytes` is what the machine has free, which is asked if it is not given. Without `max_model_len` the
    context is the model's own, cut to what the cache holds (one block less than there are). Raises UsageError
    where a longer context was asked for, and CheckpointError.
    """
    decoder = read_config(folder) if folder is not None else None
    asked = config.model.max_model_len
    longest = decoder.max_position_embeddings if decoder else FAKE_MAX_MODEL_LEN
    if decoder and asked > longest:
        raise UsageError(f"--max-model-len {asked} is longer than the {longest} tokens that the model was made for")
    num_blocks = config.cache.num_blocks or _blocks_in_memory(config, decoder, available_bytes)
    capacity = (num_blocks - 1) * config.cache.block_size
    if capacity < max(asked, 1):
        raise _too_small(config, decoder, num_blocks)
    max_model_len = asked or min(longest, capacity)
    warnings = []
    if max_model_len < (asked or longest):
        warnings.append(
            f"the context is cut from {longest} to {max_model_len} tokens, which {num_blocks} KV blocks hold; "
            "raise --kv-memory for more"
        )
    return CachePlan(num_blocks, max_model_len, warnings)


def _too_small(config: Config, decoder: DecoderConfig | None, num_blocks: int) -> UsageError:
    """What is too little, how much is needed, and what to do."""
    cache, asked = config.cache, config.model.max_model_len
    needed = -(-max(asked, 1) // cache.block_size) + 1
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


def _blocks_in_memory(config: Config, decoder: DecoderConfig | None, available_bytes: int | None) -> int:
    if decoder is None:
        return FAKE_NUM_BLOCKS
    budget = _budget_bytes(config.cache, config.scheduler.replicas, available_bytes)
    return budget // _block_bytes(config, decoder)


def _block_bytes(config: Config, decoder: DecoderConfig) -> int:
    return config.cache.block_size * kv_bytes_per_token(decoder, resolve_dtype(decoder, config.model.dtype))


def _budget_bytes(cache: CacheConfig, num_replicas: int, available_bytes: int | None) -> int:
    if cache.kv_memory != "auto":
        return memory_bytes(cache.kv_memory)
    available = _available_bytes() if available_bytes is None else available_bytes
    return min(available // AUTO_DIVISOR // num_replicas, MAX_AUTO_BYTES)


def _available_bytes() -> int:
    """Memory that processes can still get: the kernel's estimate, or less where a container allows less."""
    available = _meminfo_bytes()
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            left = int(Path(limit_file).read_text()) - int(Path(usage_file).read_text())
        except (OSError, ValueError):  # no such controller, or its limit is "max"
            continue
        available = min(available, max(left, 0))
    return available


def _meminfo_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise UsageError("cannot tell how much memory is free; give --kv-memory")
