"""What each rank of a replica has of a model, and the memory that takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from eventlm.config import Config
from eventlm.config.core import most_blocks
from eventlm.engine.plugins.launchers import resolve_launcher
from eventlm.engine.setup import layout_of
from eventlm.models.config import (
    activation_bytes,
    kv_bytes_per_token,
    resolve_dtype,
    resolve_kv_dtype,
    rope_bytes,
    state_bytes,
)
from eventlm.models.program import WeightKey
from eventlm.models.served import read_served
from eventlm.models.spec import DTYPE_BYTES
from eventlm.models.transformers_model import ServedModel, TransformersModel
from eventlm.models.weights.matrix_types import matrix_formats
from eventlm.models.weights.weight_bytes import gpu_weight_bytes, weight_bytes
from eventlm.types import ceil_div
from eventlm.worker.rank_memory import MAX_AUTO_BYTES, RankMemory
from eventlm.worker.ranks.shard import check_layout, group_slot_bytes, shard_of


class RankPart(NamedTuple):
    """What a rank has of a model, and the types of its matrices that are codes."""

    model: ServedModel
    types: Mapping[WeightKey, str]


def plans_here(config: Config) -> bool:
    """Whether the memory of the ranks is planned before it is known where they are."""
    return not resolve_launcher(config.parallel.launcher).plans_memory


def parts_of(config: Config, decoder: ServedModel, types: Mapping[WeightKey, str]) -> list[RankPart]:
    """Of each rank of a replica. Raises UsageError if the model cannot be split so."""
    layout = layout_of(config)
    check_layout(decoder, layout)
    if layout.num_ranks == 1 or isinstance(decoder, TransformersModel):
        return [RankPart(decoder, types)]
    formats = matrix_formats(types, dtype_of(config, decoder), config.model.quantization)
    shards = [shard_of(decoder, layout, layout.place_of(rank), formats) for rank in range(layout.num_ranks)]
    return [
        RankPart(shard.model, {key: types[cut.key] for key, cut in shard.slices.items() if cut.key in types})
        for shard in shards
    ]


def dtype_of(config: Config, decoder: ServedModel) -> str:
    """What is computed in."""
    return resolve_dtype(decoder, config.model.dtype, config.model.quantization)


def part_weight_bytes(config: Config, part: RankPart, dtype: str, *, is_on_gpu: bool) -> int:
    """Bytes of a rank's weights."""
    if isinstance(part.model, TransformersModel):
        return part.model.num_weights * DTYPE_BYTES[dtype]
    if is_on_gpu:
        return gpu_weight_bytes(part.model, dtype, part.types)
    return weight_bytes(part.model, dtype, config.model.quantization, part.types)


def exchanged_bytes(config: Config, decoder: ServedModel) -> int:
    """Memory that ranks share: twice what each tensor rank gives of a step to the others of its stage, or each KV group
    to the others, and all steps in flight between two stages.
    """
    layout = layout_of(config)
    of_a_rank = 2 if layout.tensor > 1 else 0
    num_streams = layout.num_ranks * of_a_rank + (layout.num_ranks - layout.groups * layout.tensor) * (
        layout.stages + 1
    )
    of_streams = num_streams * config.scheduler.batched_tokens() * decoder.hidden_size * DTYPE_BYTES["float32"]
    if layout.groups == 1 or isinstance(decoder, TransformersModel):
        return of_streams
    of_a_group = group_slot_bytes(config.scheduler.batched_tokens(), layout.groups, decoder)
    return of_streams + 2 * layout.stages * layout.groups * of_a_group


def step_bytes(config: Config, decoder: ServedModel, num_blocks: int) -> int:
    """Bytes of the activations of a rank's largest step, of a context that so many KV blocks hold."""
    num_tokens = config.scheduler.batched_tokens()
    longest = config.model.max_model_len or decoder.max_position_embeddings
    return activation_bytes(
        decoder,
        num_tokens=num_tokens,
        num_rows=min(config.scheduler.max_num_seqs, num_tokens),
        context=min(longest, num_blocks * config.cache.block_size),
    )


def rank_memory(
    config: Config, folder: Path, types: Mapping[WeightKey, str], *, num_blocks: int, num_pools: int
) -> list[RankMemory]:
    """What each rank of a replica takes of the memory of a host that its launcher has yet to find.

    num_blocks: of the cache; 0: the host decides. num_pools: of KV blocks that the engine has.
    """
    decoder = read_served(folder, config.model.model_impl)
    parts, dtype, cache = parts_of(config, decoder, types), dtype_of(config, decoder), config.cache
    kv_dtype = resolve_kv_dtype(decoder, dtype, cache.kv_cache_dtype)
    blocks = [cache.block_size * kv_bytes_per_token(part.model, kv_dtype) for part in parts]
    most = num_blocks or MAX_AUTO_BYTES // sum(blocks)
    return [
        RankMemory(
            weights=part_weight_bytes(config, part, dtype, is_on_gpu=False),
            activations=step_bytes(config, part.model, most) + ceil_div(exchanged_bytes(config, decoder), len(parts)),
            position=rope_bytes(part.model, dtype, is_on_gpu=False),
            block=block,
            states=cache.state_slots * state_bytes(part.model),
            most_cache=MAX_AUTO_BYTES // len(parts),
            min_context=max(config.model.max_model_len, 1),
            most_blocks=most_blocks(num_pools),
        )
        for part, block in zip(parts, blocks, strict=True)
    ]
