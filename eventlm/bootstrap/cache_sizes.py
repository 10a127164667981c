"""What a KV cache takes, and how much of it a sequence needs."""

from __future__ import annotations

from eventlm.config import Config
from eventlm.models.checkpoint_weights import weight_bytes
from eventlm.models.config import DecoderConfig, kv_bytes_per_token, resolve_dtype, resolve_kv_dtype
from eventlm.types import ceil_div


def block_bytes(config: Config, decoder: DecoderConfig) -> int:
    """One KV block."""
    dtype = resolve_dtype(decoder, config.model.dtype, config.model.quantization)
    kv_dtype = resolve_kv_dtype(decoder, dtype, config.cache.kv_cache_dtype)
    return config.cache.block_size * kv_bytes_per_token(decoder, kv_dtype)


def weights_bytes(config: Config, decoder: DecoderConfig) -> int:
    """The weights of one replica."""
    model = config.model
    return weight_bytes(decoder, resolve_dtype(decoder, model.dtype, model.quantization), model.quantization)


def num_blocks_needed(config: Config) -> int:
    """For one sequence of the context that was asked for, else of the shortest."""
    return ceil_div(max(config.model.max_model_len, 1), config.cache.block_size) + 1


def mebibytes(num_bytes: int) -> str:
    """For a person."""
    return f"{num_bytes >> 20:,} MiB" if num_bytes >= 1 << 20 else f"{num_bytes:,} bytes"
