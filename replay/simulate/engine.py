"""The engine of a simulation: a configuration, with defaults from the cost model and the workload."""

from __future__ import annotations

from heapq import nlargest
from typing import NamedTuple

from msgspec import UNSET, structs

from eventlm.config import CacheConfig, Config, CoreConfig, ParallelConfig, SchedulerConfig
from eventlm.config.core import most_blocks
from eventlm.core.shards import context_capacity, deal_out
from eventlm.engine.predictor.fit import fit
from eventlm.engine.setup import EngineSetup, make_setup
from eventlm.errors import UsageError
from eventlm.replay.cost.backend_model import AnyCost, BackendsCost
from eventlm.replay.cost.model import CostModel, LinearCost
from eventlm.replay.cost.roofline import RooflineCost
from eventlm.replay.simulate.backend_sets import backends_setup
from eventlm.replay.workload.workload import Workload
from eventlm.types import ceil_div
from eventlm.worker.protocol import FAKE_MODEL, StepSample, WorkerSetup
from eventlm.worker.warm_up import Shape, fitting_shapes

#: Part of a GPU's memory that weights and KV blocks may take; the rest is for activations.
MEMORY_SHARE_PPM = 900_000
#: Block size and longest context of the steps that a predictor is fitted to.
_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 1 << 18
#: Contexts of long prompts' chunks, and of decodes, in addition to those of a warm-up.
_CHUNK_CONTEXTS = (4096, 16_384, 32_768, 65_536, 131_072)
_DECODE_CONTEXTS = (4096, 16_384)
_LONG_CHUNK_TOKENS = 2048


class SimulatedSet(NamedTuple):
    """A further replicaset of a simulated engine. cost: what its steps cost, or a model of the servers that it is."""

    setup: EngineSetup
    predictor: list[int]
    cost: AnyCost


class SimulatedEngine(NamedTuple):
    """What `simulation.simulate` needs in addition to workload and cost model. notes: what was chosen, and why.
    others: the further replicasets; setup and predictor are those of the first.
    """

    setup: EngineSetup
    predictor: list[int]
    notes: list[str]
    others: list[SimulatedSet] = []


def build_engine(
    config: Config,
    workload: Workload,
    cost: AnyCost,
    *,
    model_name: str = "simulated",
    recorded: CoreConfig | None = None,
) -> SimulatedEngine:
    """Resolve a configuration as an engine's start does. `recorded`: limits of the run that the workload is from.

    Defaults: max_num_batched_tokens as recorded, or as on a CPU; num_blocks as recorded, or what fits the cost model's
    machine, or more than the workload can fill; max_model_len what the longest request needs, as far as the blocks
    reach. A model of other servers makes the replicas such servers. Raises UsageError for an invalid configuration.
    """
    if not workload.requests:
        raise UsageError(f"{workload.source}: there is no request in this workload")
    if isinstance(cost, BackendsCost):
        setup = backends_setup(config, workload, cost, model_name=model_name, recorded=recorded)
        return SimulatedEngine(setup, config.scheduler.predictor or cost.coefficients(), [])
    notes: list[str] = []
    num_blocks = _num_blocks(config, workload, cost, recorded, notes)
    scheduler = _with_budget(config.scheduler, recorded)
    if recorded is not None:
        for flag, here, there in (
            ("--replicas", scheduler.replicas, recorded.num_replicas),
            ("--max-num-seqs", scheduler.max_num_seqs, recorded.max_num_seqs),
            ("--max-num-batched-tokens", scheduler.max_num_batched_tokens, recorded.max_num_batched_tokens),
        ):
            if here != there:
                notes.append(f"{flag} is {here:,}; the run was recorded with {there:,}")
    max_model_len = _context(config, workload, num_blocks, notes)
    config = structs.replace(config, scheduler=scheduler, cache=_with_states(config, recorded))
    return SimulatedEngine(
        setup=make_setup(
            config, model="simulated", model_name=model_name, num_blocks=num_blocks, max_model_len=max_model_len
        ),
        predictor=scheduler.predictor
        or predictor_for(
            in_ranks(cost, config.parallel),
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
        ),
        notes=notes,
    )


def _num_blocks(
    config: Config, workload: Workload, cost: CostModel, recorded: CoreConfig | None, notes: list[str]
) -> int:
    """KV blocks of each replica; adds their origin to `notes`. Raises UsageError for too few or too many."""
    block_size, parallel = config.cache.block_size, config.parallel
    num_blocks = config.cache.num_blocks
    most = most_blocks(config.scheduler.replicas * parallel.kv_parallel_size)
    if num_blocks:
        if num_blocks < 2:
            raise UsageError(f"--num-blocks {num_blocks}: at least 2 are needed")
    elif recorded is not None:
        num_blocks = recorded.num_blocks
        notes.append(f"{num_blocks:,} KV blocks, as recorded")
    elif isinstance(cost, RooflineCost) and cost.machine.memory_bytes:
        split = cost.in_ranks(*_sizes(parallel))
        num_blocks = min(machine_blocks(split, block_size), most)
        # KV groups have a pool each, and the weights as often.
        num_gpus, name = split.num_gpus // split.groups, cost.machine.name
        name = f"{num_gpus} x {name}" if num_gpus > 1 else name
        each = f" in each of {split.groups} groups" if split.groups > 1 else ""
        notes.append(f"{num_blocks:,} KV blocks{each}: what {name} holds besides the weights of {cost.model.name}")
    else:
        ample = ample_blocks(workload, block_size, _most_residents(config))
        num_blocks = min(ample, most)
        of_all = "more than the workload can fill" if num_blocks == ample else "as many as an engine can have"
        notes.append(f"{num_blocks:,} KV blocks, {of_all}; --num-blocks makes them scarce")
    if num_blocks > most:
        raise UsageError(
            f"{num_blocks:,} KV blocks for each of {config.scheduler.replicas} replicas are too many, {most:,} are the "
            "most that an engine can have; give --num-blocks, or lower --replicas"
        )
    return num_blocks


def _with_states(config: Config, recorded: CoreConfig | None) -> CacheConfig:
    """With state slots as recorded, unless a number is given. Raises UsageError for too few."""
    cache, num_seqs = config.cache, _most_residents(config)
    if recorded is not None and recorded.state_slots is not UNSET and not cache.state_slots:
        interval = recorded.state_interval or 0
        cache = structs.replace(cache, state_slots=recorded.state_slots, state_interval=interval)
    if 0 < cache.state_slots <= num_seqs:
        raise UsageError(
            f"{cache.state_slots} state slots are not more than the {num_seqs} sequences that run at once: give "
            "--state-slots, or lower --max-num-seqs"
        )
    return cache


def _most_residents(config: Config) -> int:
    return config.scheduler.max_num_seqs * config.parallel.decode_batches


def in_ranks(cost: CostModel, parallel: ParallelConfig) -> CostModel:
    """The cost model of a replica that is split into ranks. Raises UsageError if it does not say what that costs."""
    tensor, stages, groups = _sizes(parallel)
    if isinstance(cost, RooflineCost):
        return cost.in_ranks(tensor, stages, groups)
    if tensor > 1:
        raise UsageError(
            f"--tensor-parallel-size {tensor}: a linear cost model does not say what tensor ranks save and exchange; "
            "take a roofline model"
        )
    return cost.in_parts(stages, groups)


def _sizes(parallel: ParallelConfig) -> tuple[int, int, int]:
    return parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.kv_parallel_size


def _with_budget(scheduler: SchedulerConfig, recorded: CoreConfig | None) -> SchedulerConfig:
    """With `max_num_batched_tokens` set: by default as recorded, or as on a CPU."""
    budget = scheduler.batched_tokens()
    if recorded is not None and not scheduler.max_num_batched_tokens:
        budget = max(recorded.max_num_batched_tokens, scheduler.max_num_seqs)
    return structs.replace(scheduler, max_num_batched_tokens=budget)


def predictor_for(model: CostModel, *, max_num_batched_tokens: int, max_num_seqs: int) -> list[int]:
    """Coefficients of `eventlm.core.predictor`, fitted to the cost model as a live engine's are to its worker.

    Beyond the steps of a warm-up, which has only two seconds, the fit covers long contexts. Attention dominates at tens
    of thousands of tokens, and an extrapolation would be too long by factors.
    """
    worker = WorkerSetup(
        replica=0,
        epoch=0,
        model=FAKE_MODEL,
        block_size=_BLOCK_SIZE,
        num_blocks=_MAX_MODEL_LEN // _BLOCK_SIZE,
        max_model_len=_MAX_MODEL_LEN,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )
    if isinstance(model, LinearCost):
        model = model.without_noise()
    chunk_tokens = min(_LONG_CHUNK_TOKENS, max_num_batched_tokens)
    long_shapes = [Shape(1, chunk_tokens, context) for context in _CHUNK_CONTEXTS]
    long_shapes += [Shape(8, 1, context) for context in _DECODE_CONTEXTS]
    shapes = [shape.step_shape() for shape in (*fitting_shapes(worker), *fitting_shapes(worker, long_shapes))]
    return fit(
        [StepSample(shape=shape, duration_ns=model.step_ns(shape, 0, step)) for step, shape in enumerate(shapes)]
    )


def machine_blocks(cost: RooflineCost, block_size: int) -> int:
    """KV blocks that fit a machine besides the weights, in a pipeline those of the fullest stage. Raises UsageError if
    fewer than 2 do.
    """
    machine, model, tensor = cost.machine, cost.model, cost.tensor
    memory_bytes = machine.memory_bytes * machine.num_gpus * MEMORY_SHARE_PPM // 1_000_000
    num_blocks = []
    for stage, layers in enumerate(deal_out(model.num_hidden_layers, cost.stages)):
        part = structs.replace(model, num_hidden_layers=len(layers))
        # Embeddings are in the first stage, the output head in the last.
        num_ends = (stage == 0) + (stage == cost.stages - 1)
        num_weights = part.layer_weights + num_ends * model.vocab_size * model.hidden_size
        weights_bytes = ceil_div(num_weights, tensor) * model.bytes_per_weight
        token_values = 2 * len(layers) * ceil_div(model.num_key_value_heads, tensor) * model.head_dim
        num_blocks.append((memory_bytes - weights_bytes) // (token_values * model.bytes_per_cache_value * block_size))
    if min(num_blocks) < 2:
        all_bytes = (model.layer_weights + 2 * model.vocab_size * model.hidden_size) * model.bytes_per_weight
        raise UsageError(
            f"{model.name} takes {all_bytes / 1e9:.0f} GB, which leaves no room for KV blocks on "
            f"{machine.num_gpus * tensor * cost.stages} x {machine.name}; more GPUs, or --num-blocks"
        )
    return min(num_blocks)


def ample_blocks(workload: Workload, block_size: int, max_num_seqs: int) -> int:
    """KV blocks for the longest sequences that can run at once."""
    lengths = (
        ceil_div(request.arrival.prompt_tokens + request.arrival.max_tokens, block_size)
        for request in workload.requests
        for _ in range(request.arrival.n)
    )
    return sum(nlargest(max_num_seqs, lengths)) + max_num_seqs + 1


def _context(config: Config, workload: Workload, num_blocks: int, notes: list[str]) -> int:
    """The longest context, limited to what the blocks hold."""
    asked = config.model.max_model_len
    parallel = config.parallel
    holds = context_capacity(num_blocks, config.cache.block_size, parallel.kv_parallel_size, parallel.kv_shard_tokens)
    if asked > holds:
        raise UsageError(
            f"--max-model-len {asked}: {num_blocks:,} blocks of {config.cache.block_size} tokens hold {holds:,}; lower "
            "it or raise --num-blocks"
        )
    if asked:
        return asked
    longest = max(request.arrival.prompt_tokens + request.arrival.max_tokens for request in workload.requests)
    if longest > holds:
        notes.append(f"the context is limited to {holds:,} tokens, which is what the KV blocks hold")
    return min(longest, holds)
