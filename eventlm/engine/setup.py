"""The resolved parts of an engine: limits, plug-ins, model. The composition makes them before the engine starts."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Struct, structs

from eventlm._version import __version__
from eventlm.config import Config, CoreConfig, SchedulerConfig
from eventlm.config.backends import BackendSpec
from eventlm.config.core import most_blocks
from eventlm.config.load import config_hash, redacted
from eventlm.config.plugin_spec import parse_plugin_spec
from eventlm.core.graph_buckets import default_buckets
from eventlm.core.shards import Layout, context_capacity
from eventlm.core.state.replicaset import Plugins
from eventlm.engine.backend import Connect, Watch
from eventlm.engine.block_names import PAIRS_PER_BLOCK
from eventlm.engine.plugins.launchers import resolve_launcher
from eventlm.engine.plugins.registry import ResolvedPlugin, resolve
from eventlm.errors import UsageError
from eventlm.events import Header, PluginRecord, ReplicasetRecord
from eventlm.launchers.launcher import Launcher
from eventlm.system.processors import compute_threads, deal_processors, spread_processors, usable_cores
from eventlm.system.system import System
from eventlm.types import NANOSECONDS_PER_SECOND, ceil_div
from eventlm.worker.protocol import WorkerReady, WorkerSetup
from eventlm.worker.rank_memory import RankMemory

#: Most steps that decode the same sequence, unless the configuration says more or less.
DECODES_IN_FLIGHT = 2


class ResolvedPlugins(NamedTuple):
    """The three plug-ins of a scheduler, and the policies that can replace the first."""

    policy: ResolvedPlugin
    batcher: ResolvedPlugin
    router: ResolvedPlugin
    extra_policies: list[ResolvedPlugin]


class Device(NamedTuple):
    """What a worker computes on. `name` is torch's; `model` is the GPU's product name."""

    name: str = "cpu"
    model: str = ""


class EngineSetup(Struct, frozen=True, kw_only=True):
    """A configuration with everything looked up. `model` is a checkpoint folder or `fake`, `tokenizer` the folder of a
    tokenizer in place of the model's own, or empty; `vocab_size` 0: unknown.

    devices: GPUs, which replicas take in turn; empty: the processor. core: with `num_blocks` 0 the workers or their
    launcher find out how many fit, and `with_blocks` makes the setup of the run. memory: of each rank of a replica, for
    a launcher that plans by it.

    Where the engine has several replicasets, `name` is this one's, `first_replica` and `first_worker` are the numbers
    of its first replica and of its first worker process, and `num_workers` how many processes the engine has; 0: only
    this set's.

    A set of backends has no model, no workers and nothing for them. backends: those at the start, which `connect` makes
    clients of; the first of its replicas. watches: tell which others there are later. backend_models: what
    they call the model; empty: not known. backends_host: what a header says of them.
    """

    config: Config
    core: CoreConfig
    model: str
    tokenizer: str = ""
    policy: ResolvedPlugin
    batcher: ResolvedPlugin
    router: ResolvedPlugin
    extra_policies: list[ResolvedPlugin] = []
    vocab_size: int = 0
    devices: list[Device] = []
    launcher: Launcher
    memory: list[RankMemory] = []
    name: str = ""
    first_replica: int = 0
    first_worker: int = 0
    num_workers: int = 0
    backends: list[BackendSpec] = []
    connect: Connect | None = None
    watches: list[Watch] = []
    backend_models: list[str] = []
    backends_host: dict[str, Any] = {}

    @property
    def forwards(self) -> bool:
        """Whether its replicas are other servers."""
        return self.core.forwards is not UNSET

    @property
    def layout(self) -> Layout:
        """The ranks of each replica."""
        return layout_of(self.config)

    @property
    def plugin_records(self) -> list[PluginRecord]:
        """As a header lists them."""
        return [plugin.record for plugin in (self.policy, *self.extra_policies, self.batcher, self.router)]

    @property
    def plugins(self) -> Plugins:
        """As the core takes them."""
        return Plugins(
            policies={policy.record.name: policy.instance for policy in (self.policy, *self.extra_policies)},
            policy=self.policy.record.name,
            batcher=self.batcher.instance,
            router=self.router.instance,
        )


def layout_of(config: Config) -> Layout:
    """The ranks of each replica."""
    parallel = config.parallel
    return Layout(parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.kv_parallel_size)


def num_ranks(config: Config) -> int:
    """Worker processes of each replica."""
    return layout_of(config).num_ranks


def num_own_workers(config: Config) -> int:
    """Worker processes of a replicaset; a set of backends has none."""
    return 0 if config.gateway.backend else config.scheduler.replicas * num_ranks(config)


class StartedSet(NamedTuple):
    """A replicaset whose workers are up. predictor: its coefficients. first: the report of its first worker."""

    setup: EngineSetup
    predictor: list[int]
    first: WorkerReady


def resolve_plugins(scheduler: SchedulerConfig) -> ResolvedPlugins:
    """Look the plug-ins up. Raises UsageError for one that cannot be loaded, or limits that contradict each other."""
    if 0 < scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise UsageError(
            f"--max-num-batched-tokens {scheduler.max_num_batched_tokens} is less than --max-num-seqs "
            f"{scheduler.max_num_seqs}: decodes would leave no room for a prompt; raise one or lower the other"
        )
    policy = resolve("policy", scheduler.policy)
    extra_policies = [resolve("policy", parse_plugin_spec(spec)) for spec in scheduler.extra_policy]
    names = [each.record.name for each in (policy, *extra_policies)]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise UsageError(f"--extra-policy {name}: this policy is installed already, and swaps go by the name")
    return ResolvedPlugins(
        policy=policy,
        batcher=resolve("batcher", scheduler.batcher),
        router=resolve("router", scheduler.router),
        extra_policies=extra_policies,
    )


def make_setup(
    config: Config,
    *,
    model: str,
    model_name: str,
    num_blocks: int,
    max_model_len: int,
    tokenizer: str = "",
    vocab_size: int = 0,
    devices: Sequence[Device] = (),
    memory: Sequence[RankMemory] = (),
) -> EngineSetup:
    """Resolve the plug-ins and derive the core's limits. Raises UsageError as `resolve_plugins` does, and for a
    launcher or a layout that cannot be.

    config: `state_slots` is 0 only without recurrent layers.
    """
    scheduler, block_size, state_slots = config.scheduler, config.cache.block_size, config.cache.state_slots
    state_interval = ceil_div(config.cache.state_interval, block_size) * block_size
    plugins = resolve_plugins(scheduler)
    launcher = resolve_launcher(config.parallel.launcher)
    if launcher.is_local and devices and num_ranks(config) > len(devices) * config.parallel.ranks_per_gpu:
        raise UsageError(
            f"{num_ranks(config)} ranks of a replica need a GPU each, and there {'is' if len(devices) == 1 else 'are'} "
            f"{len(devices)}; lower --tensor-parallel-size or --pipeline-parallel-size, or let them share GPUs with "
            f"--ranks-per-gpu {ceil_div(num_ranks(config), len(devices))}, which makes nothing faster"
        )
    core = CoreConfig(
        models=[model_name],
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        num_replicas=scheduler.replicas,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.batched_tokens(on_gpu=bool(devices)),
        max_queue_len=scheduler.max_queue_len,
        max_steps_in_flight=scheduler.max_steps_in_flight,
        max_decodes_in_flight_per_seq=scheduler.max_decodes_in_flight_per_seq or DECODES_IN_FLIGHT,
        run_ahead_ms=scheduler.run_ahead_ms,
        graph_buckets=default_buckets(scheduler.max_num_seqs) if _captures_graphs(config, devices) else [],
        max_skips=scheduler.max_skips,
        max_evictions=scheduler.max_evictions,
        # After that the replica is given up, so a later value has no effect.
        max_losses=min(config.worker.max_losses, config.worker.max_restarts),
        state_slots=state_slots or UNSET,
        state_interval=(state_slots and state_interval) or UNSET,
        **core_layout(config),
    )
    return EngineSetup(
        config=config,
        core=core,
        model=model,
        tokenizer=tokenizer,
        policy=plugins.policy,
        batcher=plugins.batcher,
        router=plugins.router,
        extra_policies=plugins.extra_policies,
        vocab_size=vocab_size,
        devices=list(devices),
        launcher=launcher,
        memory=list(memory),
    )


def _captures_graphs(config: Config, devices: Sequence[Device]) -> bool:
    """Ranks have none: nothing of what they exchange can be in one yet."""
    return bool(devices) and config.gpu.cuda_graphs and num_ranks(config) == 1


def core_layout(config: Config) -> dict[str, Any]:
    """What the core knows of a replica's ranks: the fields of `CoreConfig` that are set. Raises UsageError for what
    contradicts itself.
    """
    parallel = config.parallel
    if parallel.micro_batches and parallel.pipeline_parallel_size == 1:
        raise UsageError(
            f"--micro-batches {parallel.micro_batches}: they are of a pipeline; give --pipeline-parallel-size as well"
        )
    if parallel.micro_batches > parallel.pipeline_parallel_size + 1:
        raise UsageError(
            f"--micro-batches {parallel.micro_batches}: {parallel.pipeline_parallel_size} stages have at most "
            f"{parallel.pipeline_parallel_size + 1} steps in flight, so some sequences would never run; lower it"
        )
    decodes = config.scheduler.max_decodes_in_flight_per_seq
    if decodes > 1 and parallel.pipeline_parallel_size > 1:
        raise UsageError(
            f"--max-decodes-in-flight-per-seq {decodes}: the first stage of a pipeline needs the token that the last "
            "one draws, so a sequence has one decode in flight; leave it out"
        )
    if parallel.kv_parallel_size > 1 and parallel.kv_shard_tokens % config.cache.block_size:
        raise UsageError(
            f"--kv-shard-tokens {parallel.kv_shard_tokens} is no multiple of --block-size {config.cache.block_size}: a "
            "block lies in one KV group"
        )
    if parallel.kv_parallel_size > 1 and config.cache.state_slots:
        raise UsageError(
            f"--kv-parallel-size {parallel.kv_parallel_size}: this model has recurrent layers, whose states lie in one "
            "place; leave it out"
        )
    found: dict[str, Any] = {}
    if parallel.pipeline_parallel_size > 1:
        found["num_stages"] = parallel.pipeline_parallel_size
    if parallel.micro_batches:
        found["micro_batches"] = parallel.micro_batches
    if parallel.kv_parallel_size > 1:
        found |= {"num_kv_groups": parallel.kv_parallel_size, "kv_shard_tokens": parallel.kv_shard_tokens}
    return found


def with_blocks(setup: EngineSetup, found: Sequence[int]) -> EngineSetup:
    """The setup for the KV blocks that fit into the worker of each replica (0: as many as were configured).

    All replicas get as many as the one with the fewest, up to an engine's limit, and the context is cut to what these
    hold. Raises UsageError if that is less than what was asked for.
    """
    core, asked = setup.core, setup.config.model.max_model_len
    num_blocks = min(*(each or core.num_blocks for each in found), most_blocks(core.num_replicas * core.groups))
    capacity = context_capacity(num_blocks, core.block_size, core.groups, core.kv_shard_tokens or 0)
    if capacity < max(asked, 1):
        wish = f"--max-model-len {asked}" if asked else "even the shortest context"
        raise UsageError(
            f"{wish} does not fit: beside the weights there is room for {num_blocks:,} KV blocks, which hold a context "
            f"of {capacity:,} tokens; " + ("lower it, " if asked else "") + "raise --gpu-memory-utilization, or give "
            "--kv-cache-dtype fp8"
        )
    sized = structs.replace(core, num_blocks=num_blocks, max_model_len=min(core.max_model_len, capacity))
    return structs.replace(setup, core=sized)


def worker_setups(setup: EngineSetup) -> list[WorkerSetup]:
    """The ranks of the first worker of each replica, one replica after the other. Whether they measure is decided
    later.
    """
    if setup.forwards:
        return []
    config, core, layout = setup.config, setup.core, setup.layout
    num_own = core.num_replicas * layout.num_ranks
    first, num_workers = setup.first_worker, setup.num_workers or num_own
    threads = config.worker.threads
    if not threads and setup.launcher.is_local:
        threads = compute_threads(num_workers, usable_cores())
    pins = config.worker.pin_threads and setup.launcher.is_local
    processors = _processors(setup, threads) if pins else [[]] * num_own
    devices = setup.devices or [Device()]
    num_devices = len(devices)
    # On this host, workers on one GPU share it. Elsewhere each is given its own.
    num_sharing = num_workers if setup.launcher.is_local else 1
    return [
        WorkerSetup(
            replica=setup.first_replica + (number - first) // layout.num_ranks,
            epoch=1,
            model=setup.model,
            tokenizer=setup.tokenizer,
            dtype=config.model.dtype,
            quantization=config.model.quantization,
            model_impl=config.model.model_impl,
            kv_cache_dtype=config.cache.kv_cache_dtype,
            block_size=core.block_size,
            num_blocks=core.num_blocks,
            state_slots=core.state_slots or 0,
            max_model_len=core.max_model_len,
            max_num_batched_tokens=core.max_num_batched_tokens,
            max_num_seqs=core.max_num_seqs,
            decode_batches=core.decode_batches,
            max_steps_in_flight=core.steps_in_flight,
            device=devices[number % num_devices].name,
            gpu=devices[number % num_devices].model,
            threads=threads,
            processors=processors[number - first],
            cpu_kernels=config.worker.cpu_kernels,
            attention_backend=config.gpu.attention_backend,
            graph_buckets=core.graph_buckets,
            batch_invariant=config.gpu.batch_invariant,
            torch_compile=config.gpu.torch_compile,
            gpu_memory_ppm=config.gpu.memory_ppm // len(range(number % num_devices, num_sharing, num_devices)),
            heartbeat_ns=config.worker.heartbeat_ns,
            warm_up=False,
            profile_ops=config.worker.profile_ops,
            fake=config.model.fake,
            layout=layout,
            rank=(number - first) % layout.num_ranks,
            memory=setup.memory[(number - first) % layout.num_ranks] if setup.memory else None,
            kv_shard_tokens=core.kv_shard_tokens or 0,
        )
        for number in range(first, first + num_own)
    ]


def _processors(setup: EngineSetup, threads: int) -> list[list[int]]:
    """Those that the threads of each worker are kept on; none if there are too few."""
    num_replicas, num_ranks = setup.core.num_replicas, setup.layout.num_ranks
    if setup.num_workers:
        first, num_own = setup.first_worker, num_replicas * num_ranks
        return deal_processors(setup.num_workers, threads)[first : first + num_own] or [[]] * num_own
    if num_ranks > 1:
        # What ranks exchange in each layer goes through memory: a rank is on one NUMA node.
        return deal_processors(num_replicas * num_ranks, threads) or [[]] * (num_replicas * num_ranks)
    order = spread_processors()
    if len(order) < threads * num_replicas:
        order = []
    return [order[replica * threads : (replica + 1) * threads] for replica in range(num_replicas)]


def make_run_id(system: System) -> str:
    """Sortable by time, unique by chance."""
    now = datetime.fromtimestamp(system.clock.unix_ns() // NANOSECONDS_PER_SECOND, UTC)
    return f"{now:%Y%m%d-%H%M%S}-{system.chance.token_bytes(3).hex()}"


def make_header(
    setup: EngineSetup,
    run: str,
    seed: int,
    predictor: list[int],
    origin: str,
    first: WorkerReady,
    *,
    unix_start_ns: int,
    others: Sequence[StartedSet] = (),
) -> Header:
    """The trace's first line. Nothing secret is in it. `origin` is where the predictor's coefficients come from.

    others: the further replicasets, in their order.
    """
    config = redacted(setup.config)
    return Header(
        run=run,
        unix_start_ns=str(unix_start_ns),
        code_version=__version__,
        core=setup.core,
        config=config,
        config_hash=config_hash(config),
        plugins=setup.plugin_records,
        predictor=predictor,
        seeds={"requests": str(seed)},
        model_fingerprint=first.model_fingerprint,
        block_table_size=PAIRS_PER_BLOCK * setup.core.blocks_per_replica,
        host=describe_host() | {"predictor": origin} | first.host,
        level="tokens" if setup.config.record.record_tokens else "default",
        replicaset=setup.name if others else UNSET,
        replicasets=[
            ReplicasetRecord(
                name=each.setup.name,
                core=each.setup.core,
                plugins=each.setup.plugin_records,
                predictor=each.predictor,
                model_fingerprint=each.first.model_fingerprint,
                block_table_size=PAIRS_PER_BLOCK * each.setup.core.blocks_per_replica,
                host=each.first.host,
            )
            for each in others
        ]
        or UNSET,
    )


def describe_host() -> dict[str, Any]:
    """The machine and its Python for the header; workers add their compute back end."""
    return {
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "msgspec": msgspec.__version__,
        "cores": len(os.sched_getaffinity(0)),
    }


def _cpu_name() -> str:
    """The processor's name; empty if it is not known."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor()
