"""Whether a replica, and the memory and the processors of this machine, are enough for so many worker processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from eventlm.config import Config
from eventlm.config.core import MAX_RANKS_OF_REPLICA
from eventlm.engine.plugins.launchers import resolve_launcher
from eventlm.engine.setup import layout_of, num_own_workers, num_ranks
from eventlm.errors import UsageError
from eventlm.formatting import counted
from eventlm.launchers.process_memory import check_process_memory
from eventlm.system.processors import usable_cores


def check_num_ranks(config: Config) -> None:
    """Raise UsageError for more ranks than a replica can have."""
    if num_ranks(config) > MAX_RANKS_OF_REPLICA:
        raise UsageError(
            f"{layout_of(config).describe()} are {num_ranks(config):,} ranks, and a replica has up to "
            f"{MAX_RANKS_OF_REPLICA:,}; lower {' or '.join(_layout_flags([config]))}"
        )


def check_room_for_workers(configs: Sequence[Config]) -> None:
    """Raise UsageError if the memory that is free does not hold the worker processes of all replicasets."""
    num_here: Counter[str] = Counter()
    for config in configs:
        if num_own_workers(config) and resolve_launcher(config.parallel.launcher).is_local:
            num_here[config.model.model] += num_own_workers(config)
    flags = " or ".join(["--replicas", *_layout_flags(configs)])
    check_process_memory(num_here, f"lower {flags}, or take more hosts with --launcher ray")


def _layout_flags(configs: Sequence[Config]) -> list[str]:
    """Flags by which replicas have more than one rank."""
    layouts = list(map(layout_of, configs))
    sizes = {
        "--tensor-parallel-size": [layout.tensor for layout in layouts],
        "--pipeline-parallel-size": [layout.stages for layout in layouts],
        "--kv-parallel-size": [layout.groups for layout in layouts],
    }
    return [flag for flag, each in sizes.items() if max(each) > 1]


def thread_warnings(config: Config) -> list[str]:
    """A warning if there are more threads than processors."""
    threads, replicas, ranks, cores = (
        config.worker.threads,
        config.scheduler.replicas,
        num_ranks(config),
        usable_cores(),
    )
    if not resolve_launcher(config.parallel.launcher).is_local:
        return []
    if (threads or ranks > 1) * replicas * ranks <= cores:
        return []
    what = f"--threads {threads}" if threads else "one thread"
    if ranks > 1:
        of_all = f" of each of {replicas * ranks} ranks"
    else:
        of_all = f" of each of {replicas} replicas" if replicas > 1 else ""
    return [
        f"{what}{of_all} is more than the {counted(cores, 'processor')} that can be kept "
        "busy here: they will wait for each other, and nothing gets faster"
    ]
