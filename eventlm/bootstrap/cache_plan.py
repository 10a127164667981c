"""How many KV blocks and state slots each replica gets, how long a context they allow, and whether the memory is there.

How many blocks fit into a GPU beside activations is measured by the workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from eventlm.bootstrap.gpus import INTERPRETER, Gpu
from eventlm.bootstrap.rank_parts import dtype_of, exchanged_bytes, part_weight_bytes, parts_of, plans_here, step_bytes
from eventlm.config import Config
from eventlm.config.core import most_blocks
from eventlm.config.structs import memory_bytes
from eventlm.core.shards import context_capacity
from eventlm.engine.setup import layout_of
from eventlm.errors import TooLittleMemoryError, UsageError
from eventlm.models.config import (
    check_runs_on_gpu,
    kv_bytes_per_token,
    resolve_kv_dtype,
    rope_bytes,
    state_bytes,
)
from eventlm.models.program import WeightKey
from eventlm.models.served import read_served
from eventlm.models.transformers_model import ServedModel
from eventlm.system.free_memory import free_bytes, total_bytes
from eventlm.types import ceil_div
from eventlm.worker.protocol import FAKE_MODEL
from eventlm.worker.rank_memory import AUTO_DIVISOR, MAX_AUTO_BYTES, blocks_beside_tables

#: The fake model stores no keys and values; these are what a small real one would have.
FAKE_NUM_BLOCKS = 4096
FAKE_MAX_MODEL_LEN = 8192


class CachePlan(NamedTuple):
    """`num_blocks` for each replica, the context in tokens, and warnings.

    num_blocks 0: how many there is room for is found out where the workers are, and the context may have to be cut.
    """

    num_blocks: int
    max_model_len: int
    warnings: list[str]


class _Sizes(NamedTuple):
    """Bytes of a replica's weights, of the activations of its largest step (0 on GPUs, where workers measure them), of
    its rotary tables for one position, of a KV block, of the cache of a sequence of the context that was asked for,
    else of the shortest, and of all state slots. All ranks of the replica together.
    """

    weights: int
    activations: int
    position: int
    block: int
    sequence: int
    states: int


class Neighbours(NamedTuple):
    """Replicas of other replicasets on the same machine: how many, bytes of all their weights, and how many pools of
    blocks they have: one for each KV group.
    """

    num_replicas: int = 0
    num_bytes: int = 0
    num_pools: int = 0


#: Of an engine with one replicaset.
ALONE = Neighbours()


def weight_bytes_of(config: Config, folder: Path | None, types: Mapping[WeightKey, str] | None = None) -> int:
    """Bytes of the weights of all replicas of a replicaset that runs on processors; 0 of the fake model."""
    if folder is None:
        return 0
    sizes = _sizes(config, read_served(folder, config.model.model_impl), types or {})
    return config.scheduler.replicas * sizes.weights


def num_kv_pools(config: Config) -> int:
    """Pools of KV blocks of all replicas of a replicaset."""
    return config.scheduler.replicas * config.parallel.kv_parallel_size


def check_kv_memory(config: Config, gpus: Sequence[Gpu] = ()) -> None:
    """Check that there is the memory that `--kv-memory` asks for, before there is a model. Raises UsageError."""
    cache = config.cache
    if config.model.model == FAKE_MODEL or cache.kv_memory == "auto" or cache.num_blocks:
        return
    num_bytes, given = memory_bytes(cache.kv_memory), f"--kv-memory {cache.kv_memory}"
    if gpus:
        _check_cache_fits(config, gpus, cache_bytes=num_bytes, given=given)
    elif plans_here(config):
        _check_against_all(config, num_bytes, given)


def plan_states(
    config: Config,
    folder: Path | None,
    types: Mapping[WeightKey, str] | None = None,
    neighbours: Neighbours = ALONE,
) -> tuple[Config, list[str]]:
    """The configuration with as many state slots as there will be, 0 without recurrent layers, and warnings.

    types, neighbours: as of `plan_cache`.

    By default there are two for every sequence, as far as half of the cache's memory holds them; where that is less
    than enough, `max_num_seqs` is lowered. Raises UsageError for too few slots and CheckpointError.
    """
    cache, num_seqs = config.cache, config.scheduler.max_num_seqs
    num_batches = config.parallel.decode_batches
    slot_bytes = _slot_bytes(config, folder, types or {})
    if slot_bytes is None:
        if cache.state_slots:
            raise UsageError(
                f"--state-slots {cache.state_slots} is for a model with recurrent layers, and {config.model.model} has "
                "none; leave it out"
            )
        return config, []
    warnings: list[str] = []
    num_slots = cache.state_slots or 2 * num_seqs * num_batches
    is_known = plans_here(config) or cache.kv_memory != "auto"
    if not cache.state_slots and folder is not None and is_known:
        sizes = _sizes(config, read_served(folder, config.model.model_impl), types or {})
        num_slots = min(
            num_slots, _cache_bytes(config, neighbours, beside=sizes.weights + sizes.activations) // 2 // slot_bytes
        )
        # So that there are copies to start from.
        most_seqs = min(num_seqs, num_slots * 3 // (4 * num_batches))
        if most_seqs < num_seqs:
            if not most_seqs:
                raise UsageError(
                    f"the memory for the cache is too little: two states of {_mib(slot_bytes)} each must fit into half "
                    f"of it; give --kv-memory {ceil_div(4 * slot_bytes, 1024)}KiB or more"
                )
            warnings.append(
                f"--max-num-seqs is lowered from {num_seqs} to {most_seqs}: half of the cache's memory holds "
                f"{num_slots} states of {_mib(slot_bytes)}, and a quarter of them are copies to start from; raise "
                "--kv-memory, or give --state-slots"
            )
            num_seqs = most_seqs
    if num_slots <= num_seqs * num_batches:
        batches = f" in each of {num_batches} micro-batches" if num_batches > 1 else ""
        raise UsageError(
            f"--state-slots {num_slots} is not more than --max-num-seqs {num_seqs}{batches}: every sequence that runs "
            "takes one, and at least one is for copies; raise it, or lower the other"
        )
    if config.scheduler.batched_tokens() < cache.block_size:
        raise UsageError(
            f"--max-num-batched-tokens {config.scheduler.batched_tokens()} is less than --block-size "
            f"{cache.block_size}: with recurrent layers a step must have room for a whole block; raise it"
        )
    config = structs.replace(
        config,
        cache=structs.replace(cache, state_slots=num_slots),
        scheduler=structs.replace(config.scheduler, max_num_seqs=num_seqs),
    )
    return config, warnings


def _slot_bytes(config: Config, folder: Path | None, types: Mapping[WeightKey, str]) -> int | None:
    """Bytes of a state slot, 0 of the fake model's; None without recurrent layers."""
    if folder is None:
        return 0 if config.model.fake.get("recurrent") else None
    parts = parts_of(config, read_served(folder, config.model.model_impl), types)
    return sum(state_bytes(part.model) for part in parts) or None


def plan_cache(
    config: Config,
    folder: Path | None,
    gpus: Sequence[Gpu] = (),
    types: Mapping[WeightKey, str] | None = None,
    neighbours: Neighbours = ALONE,
) -> CachePlan:
    """Size the KV cache for the checkpoint in `folder` (None: the fake model), which runs on `gpus` if there are any.
    config: from `plan_states`. types: of matrices that are codes, see `matrix_types` and `gpu_types`. neighbours: they
    share the memory.

    Without `max_model_len` the context is the model's own, cut to what the cache holds (one block less than it has).
    Raises UsageError where a longer context was asked for, or the weights or the blocks that were asked for do not fit
    into memory or are more than an engine can have, and CheckpointError.
    """
    asked, longest, sizes = config.model.max_model_len, FAKE_MAX_MODEL_LEN, None
    warnings: list[str] = []
    num_blocks = config.cache.num_blocks or FAKE_NUM_BLOCKS
    if folder is not None:
        decoder = read_served(folder, config.model.model_impl)
        longest = decoder.max_position_embeddings
        if asked > longest:
            raise UsageError(f"--max-model-len {asked} is longer than the {longest} tokens that the model was made for")
        sizes = _sizes(config, decoder, types or {}, is_on_gpu=bool(gpus))
        if not gpus and plans_here(config):
            num_blocks, warnings = _plan_in_memory(config, folder, sizes, longest, neighbours)
        else:
            if gpus:
                num_blocks, warnings = _plan_on_gpus(config, folder, sizes, gpus, longest)
            else:
                num_blocks = _given_blocks(config, sizes)
            if not num_blocks and config.cache.kv_memory == "auto":
                return CachePlan(0, asked or longest, warnings)
    num_blocks, cut = _within_limit(config, num_blocks, neighbours)
    warnings = [*warnings, *cut]
    parallel = config.parallel
    capacity = context_capacity(
        num_blocks, config.cache.block_size, parallel.kv_parallel_size, parallel.kv_shard_tokens
    )
    if capacity < max(asked, 1):
        raise _too_small(config, sizes, num_blocks)
    max_model_len = asked or min(longest, capacity)
    if max_model_len < (asked or longest):
        too_few = "--num-blocks" if config.cache.num_blocks or sizes is None else "--kv-memory"
        warnings.append(
            f"the context is cut from {longest} to {max_model_len} tokens, which {num_blocks} KV blocks hold; "
            f"raise {too_few} for more"
        )
    return CachePlan(num_blocks, max_model_len, warnings)


def _sizes(config: Config, decoder: ServedModel, types: Mapping[WeightKey, str], *, is_on_gpu: bool = False) -> _Sizes:
    """Of all ranks of a replica together; on GPUs, of which each rank has one, of the rank that has most."""
    cache, dtype = config.cache, dtype_of(config, decoder)
    parts = parts_of(config, decoder, types)
    if is_on_gpu:
        for part in parts:
            check_runs_on_gpu(part.model)
    total = max if is_on_gpu else sum
    kv_dtype = resolve_kv_dtype(decoder, dtype, cache.kv_cache_dtype)
    block = cache.block_size * total(kv_bytes_per_token(part.model, kv_dtype) for part in parts)
    return _Sizes(
        weights=total(part_weight_bytes(config, part, dtype, is_on_gpu=is_on_gpu) for part in parts),
        activations=0
        if is_on_gpu
        else sum(_activation_bytes(config, part.model, block) for part in parts) + exchanged_bytes(config, decoder),
        position=total(rope_bytes(part.model, dtype, is_on_gpu=is_on_gpu) for part in parts),
        block=block,
        sequence=_num_blocks_needed(config) * block,
        states=cache.state_slots * total(state_bytes(part.model) for part in parts),
    )


def _activation_bytes(config: Config, decoder: ServedModel, block: int) -> int:
    """Bytes of the activations of a rank's largest step. block: bytes of a KV block of all ranks."""
    # A context is no longer than the cache, which activations make smaller.
    return step_bytes(config, decoder, config.cache.num_blocks or _cache_bytes(config, beside=0) // block)


def _cache_bytes(config: Config, neighbours: Neighbours = ALONE, *, beside: int) -> int:
    """Memory for the KV blocks and state slots of each replica, as far as no number of blocks is given.

    With `kv_memory` auto, for its rotary tables too. beside: bytes of a replica's weights and activations.
    """
    if config.cache.kv_memory != "auto":
        return memory_bytes(config.cache.kv_memory)
    num_replicas = config.scheduler.replicas
    left = max(free_bytes() - neighbours.num_bytes - num_replicas * beside, 0)
    return min(left // AUTO_DIVISOR // (num_replicas + neighbours.num_replicas), MAX_AUTO_BYTES)


def _within_limit(config: Config, num_blocks: int, neighbours: Neighbours) -> tuple[int, list[str]]:
    """The number of blocks, at most what an engine can have, and warnings. Raises UsageError if more were asked for."""
    num_pools = num_kv_pools(config) + neighbours.num_pools
    most = most_blocks(num_pools)
    if num_blocks <= most:
        return num_blocks, []
    limit = f"{most:,}"
    if num_pools > 1:
        has_groups = num_pools > config.scheduler.replicas + neighbours.num_replicas
        limit += f" for each of {num_pools} {'KV groups' if has_groups else 'replicas'}"
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


def _plan_on_gpus(
    config: Config, folder: Path, sizes: _Sizes, gpus: Sequence[Gpu], longest: int
) -> tuple[int, list[str]]:
    """Blocks of each replica, 0 if none were asked for and the workers can measure, and warnings.

    longest: context that the model was made for.
    """
    cache = config.cache
    if not cache.num_blocks and cache.kv_memory == "auto":
        # Workers make tables of the whole context before they measure.
        tables = sizes.position * (config.model.max_model_len or longest)
        warnings = _check_sequence_fits(config, folder, sizes, tables, gpus)
        if gpus[0].name == INTERPRETER:
            raise UsageError(
                "--device cuda with TRITON_INTERPRET=1 computes on the processor, in a GPU's place: there is no "
                "GPU memory to measure for the KV cache; give its size with --num-blocks or --kv-memory, or unset "
                "TRITON_INTERPRET to compute on a GPU"
            )
        return 0, warnings
    given, num_blocks = f"--num-blocks {cache.num_blocks}", cache.num_blocks
    if not num_blocks:
        given, num_blocks = f"--kv-memory {cache.kv_memory}", memory_bytes(cache.kv_memory) // sizes.block
    tables = _table_bytes(config, sizes, num_blocks, longest)
    _check_sequence_fits(config, folder, sizes, tables, gpus)
    cache_bytes = num_blocks * sizes.block
    return num_blocks, _check_cache_fits(
        config, gpus, cache_bytes=cache_bytes, weights=sizes.weights, tables=tables, given=given
    )


def _plan_in_memory(
    config: Config, folder: Path, sizes: _Sizes, longest: int, neighbours: Neighbours
) -> tuple[int, list[str]]:
    """Blocks of each replica, and warnings. longest: context that the model was made for.

    UsageError unless each gets its weights, activations and rotary tables and a sequence into free memory.
    """
    cache, num_replicas = config.cache, config.scheduler.replicas
    free = max(free_bytes() - neighbours.num_bytes, 0)
    asked = config.model.max_model_len
    num_blocks = cache.num_blocks or _num_blocks_within(config, sizes, asked or longest, neighbours)
    tables = _table_bytes(config, sizes, num_blocks, longest)
    left = free - num_replicas * (sizes.weights + sizes.activations + tables)
    if num_replicas * (sizes.sequence + sizes.states) > left:
        takes, remedy = _takes_and_remedy(config, folder, num_replicas, sizes, tables)
        raise TooLittleMemoryError(
            f"{takes}, and {_mib(free)} of memory are free; {remedy}take a smaller model, or end other programs"
        )
    if cache.num_blocks:
        _check_against_all(config, num_blocks * sizes.block + sizes.states, f"--num-blocks {num_blocks}")
    cache_bytes = num_replicas * (num_blocks * sizes.block + sizes.states)
    if cache_bytes <= left:
        return num_blocks, []
    warning = (
        f"the KV cache may grow to {_mib(cache_bytes)}, and weights, activations and rotary tables leave {_mib(left)} "
        "of the memory that is free; when it is full the system may end a worker; lower --kv-memory or --num-blocks"
    )
    return num_blocks, [warning]


def _table_bytes(config: Config, sizes: _Sizes, num_blocks: int, longest: int) -> int:
    """Bytes of a replica's rotary tables: of the context that was asked for, else of what so many KV blocks hold."""
    held = max(num_blocks - 1, 1) * config.cache.block_size
    return sizes.position * (config.model.max_model_len or min(longest, held))


def _given_blocks(config: Config, sizes: _Sizes) -> int:
    """KV blocks that were asked for, or that the memory holds which was; 0: neither was."""
    if config.cache.num_blocks or config.cache.kv_memory == "auto":
        return config.cache.num_blocks
    return max(memory_bytes(config.cache.kv_memory) - sizes.states, 0) // sizes.block


def _num_blocks_within(config: Config, sizes: _Sizes, longest: int, neighbours: Neighbours) -> int:
    """KV blocks that the memory for the cache holds, with `kv_memory` auto beside the context's rotary tables.

    longest: context in tokens that the tables may have.
    """
    num_bytes = max(_cache_bytes(config, neighbours, beside=sizes.weights + sizes.activations) - sizes.states, 0)
    if config.cache.kv_memory != "auto":
        return num_bytes // sizes.block
    return blocks_beside_tables(
        num_bytes, sizes.block, sizes.position, block_size=config.cache.block_size, longest=longest
    )


def _too_small(config: Config, sizes: _Sizes | None, num_blocks: int) -> UsageError:
    """The error for a context that does not fit: what is too little, how much is needed, and what to do."""
    cache, asked = config.cache, config.model.max_model_len
    needed = _num_blocks_needed(config)
    wish = f"a context of {asked:,} tokens" if asked else "even the shortest context"
    remedy = ", or lower --max-model-len" if asked else ""
    if cache.num_blocks or sizes is None:
        return UsageError(
            f"too few KV blocks: {wish} needs {needed:,} of {cache.block_size} tokens, there are {num_blocks:,}; "
            f"raise --num-blocks{remedy}"
        )
    kib = ceil_div(sizes.sequence + sizes.states, 1024)
    have, tables = f"--kv-memory {cache.kv_memory}", 0
    if cache.kv_memory == "auto":
        have, tables = "the memory that is free", sizes.position * asked
    beside = _beside((("states", sizes.states), ("rotary tables", tables)))
    return (TooLittleMemoryError if cache.kv_memory == "auto" else UsageError)(
        f"{have} is too little: {wish} needs {needed:,} KV blocks of {sizes.block:,} bytes for each replica{beside}; "
        f"give --kv-memory {kib}KiB or more{remedy}"
    )


def _check_against_all(config: Config, cache_bytes: int, given: str) -> None:
    """Whether all of memory would hold a cache of so many bytes for each replica. UsageError if not."""
    there = total_bytes()
    num_replicas = config.scheduler.replicas
    if num_replicas * cache_bytes > there:
        asked_for = f"a KV cache of {_mib(cache_bytes)} is"
        if num_replicas > 1:
            asked_for = (
                f"KV caches of {_mib(num_replicas * cache_bytes)} for {num_replicas} replicas "
                f"({_mib(cache_bytes)} each) are"
            )
        raise UsageError(
            f"{given}: {asked_for} more than all the memory here, which is {_mib(there)}; give less, or leave it "
            "out for what fits"
        )


def _takes_and_remedy(config: Config, folder: Path, num_replicas: int, sizes: _Sizes, tables: int) -> tuple[str, str]:
    """The least that so many replicas in one memory take, and how to take less, both in words."""
    of_each = f" for each of {num_replicas} replicas" if num_replicas > 1 else ""
    parts = {
        "activations": sizes.activations,
        "rotary tables": tables,
        "the KV cache of one sequence": sizes.sequence,
        f"the states of {config.cache.state_slots} slots": sizes.states,
    }
    takes = ", ".join(
        (
            f"{folder}: its weights take {_mib(sizes.weights)}{of_each}",
            *(f"{name} {_mib(num_bytes)}" for name, num_bytes in parts.items() if num_bytes),
        )
    )
    remedies = {
        "--replicas": num_replicas > 1,
        "--max-num-batched-tokens": config.scheduler.max_num_batched_tokens and sizes.activations,
        "--max-num-seqs": sizes.activations,
        "--max-model-len": config.model.max_model_len or tables > sizes.sequence,
    }
    return takes, "".join(f"lower {flag}, " for flag, helps in remedies.items() if helps)


def _check_sequence_fits(config: Config, folder: Path, sizes: _Sizes, tables: int, gpus: Sequence[Gpu]) -> list[str]:
    """Whether each replica gets its weights, rotary tables and one sequence into its share of its GPU; warnings.

    Raises UsageError with the figures.
    """
    flag = f"--gpu-memory-utilization {config.gpu.gpu_memory_utilization}"
    warnings = []
    for gpu, num_replicas in _shared(gpus, config.scheduler.replicas * layout_of(config).num_ranks):
        takes, remedy = _takes_and_remedy(config, folder, num_replicas, sizes, tables)
        needed = num_replicas * (sizes.weights + tables + sizes.sequence)
        allowed = gpu.total_bytes * config.gpu.memory_ppm // 1_000_000
        if needed > allowed:
            raise UsageError(
                f"{takes}, and {flag} allows {_mib(allowed)} of the {_mib(gpu.total_bytes)} of {_name(gpu)}"
                f"; {'raise it, ' if needed <= gpu.total_bytes else ''}{remedy}or take a smaller model"
            )
        if needed > gpu.free_bytes:
            raise TooLittleMemoryError(
                f"{takes}, and of the {_mib(gpu.total_bytes)} of {_name(gpu)} {_mib(gpu.free_bytes)} are "
                f"free; {remedy}end other programs on it, which `nvidia-smi` lists, or take a smaller model"
            )
        if allowed > gpu.free_bytes:
            warnings.append(
                f"other programs hold memory of {_name(gpu)}: {flag} allows {_mib(allowed)}, and "
                f"{_mib(gpu.free_bytes)} are free, so the KV cache will be smaller"
            )
    return warnings


def _check_cache_fits(
    config: Config, gpus: Sequence[Gpu], *, cache_bytes: int, weights: int = 0, tables: int = 0, given: str
) -> list[str]:
    """Whether the GPUs have the memory for KV caches of so many bytes a replica, which `given` asked for, and for
    weights and rotary tables of so many; warnings. Raises UsageError.
    """
    warnings = []
    for gpu, num_replicas in _shared(gpus, config.scheduler.replicas * layout_of(config).num_ranks):
        of_each = f" for each of {num_replicas} replicas" if num_replicas > 1 else ""
        beside = _beside((("weights", weights), ("rotary tables", tables)))
        takes = f"{given}: a KV cache of {_mib(cache_bytes)}{beside}{of_each} is more than"
        needed = num_replicas * (cache_bytes + weights + tables)
        if needed > gpu.total_bytes:
            raise UsageError(
                f"{takes} all the memory of {_name(gpu)}, which is {_mib(gpu.total_bytes)}; give less, or leave "
                "it out for what fits"
            )
        if needed > gpu.free_bytes:
            warnings.append(f"{takes} is free on {_name(gpu)}, {_mib(gpu.free_bytes)}; its worker may not start")
    return warnings


def _shared(gpus: Sequence[Gpu], num_replicas: int) -> list[tuple[Gpu, int]]:
    """The GPUs that replicas, or their ranks, are on, which they take in turn, and how many are on each."""
    return [(gpu, len(range(index, num_replicas, len(gpus)))) for index, gpu in enumerate(gpus[:num_replicas])]


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.number} ({gpu.name})"


def _num_blocks_needed(config: Config) -> int:
    """KV blocks of one sequence of the context that was asked for, else of the shortest."""
    return ceil_div(max(config.model.max_model_len, 1), config.cache.block_size) + 1


def _beside(parts: Sequence[tuple[str, int]]) -> str:
    """What else takes memory, and how many bytes, in words; empty if none of them does."""
    found = " and ".join(f"{_mib(num_bytes)} of {name}" for name, num_bytes in parts if num_bytes)
    return f" beside {found}" if found else ""


def _mib(num_bytes: int) -> str:
    """A number of bytes in words."""
    return f"{num_bytes >> 20:,} MiB" if num_bytes >= 1 << 20 else f"{num_bytes:,} bytes"
