"""How many KV blocks replicas get out of the memory of the hosts where their ranks are. Plain arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import structs

from eventlm.core.shards import context_capacity
from eventlm.launchers.launcher import LaunchError
from eventlm.launchers.ray.messages import HostFacts
from eventlm.types import ceil_div
from eventlm.worker.protocol import WorkerSetup
from eventlm.worker.rank_memory import RankMemory


class PlacedReplica(NamedTuple):
    """The setups of a replica's ranks, and where each of them will run."""

    setups: Sequence[WorkerSetup]
    hosts: Sequence[HostFacts]


class _PlacedRank(NamedTuple):
    """free: bytes that it may count on. num_there: ranks that share its host's memory, this one among them."""

    setup: WorkerSetup
    memory: RankMemory
    host: HostFacts
    free: int
    num_there: int


def setups_with_blocks(
    setups: Sequence[WorkerSetup], replicas: Sequence[PlacedReplica], others: Sequence[PlacedReplica] = ()
) -> list[WorkerSetup]:
    """The setups of one of the replicas with as many KV blocks as every rank of all of them has memory for, and a
    context that these hold; the number that is given, if one is. others: those of other replicasets.

    The ranks of a host share what was free there before they started, after their weights and activations in equal
    parts. Raises LaunchError for one that has too little.
    """
    ranks = _ranks(replicas, others)
    for rank in ranks:
        _check_fits(rank)
    num_blocks = setups[0].num_blocks or min(_blocks_of(rank) for rank in ranks)
    context = _capacity(setups[0], num_blocks)
    return [
        structs.replace(setup, num_blocks=num_blocks, max_model_len=min(setup.max_model_len, context))
        for setup in setups
    ]


def _ranks(replicas: Sequence[PlacedReplica], others: Sequence[PlacedReplica]) -> list[_PlacedRank]:
    left: dict[str, int] = {}
    num_there: Counter[str] = Counter()
    for _, _, host in (*_placed(replicas), *_placed(others)):
        num_there[host.node] += 1
        left[host.node] = min(left.get(host.node, host.free_bytes), host.free_bytes)
    for _, memory, host in (*_placed(replicas), *_placed(others)):
        left[host.node] -= memory.weights + memory.activations
    found = []
    for setup, memory, host in _placed(replicas):
        share = memory.weights + memory.activations + left[host.node] // num_there[host.node]
        found.append(_PlacedRank(setup, memory, host, max(share, 0), num_there[host.node]))
    return found


def _placed(replicas: Sequence[PlacedReplica]) -> Iterator[tuple[WorkerSetup, RankMemory, HostFacts]]:
    for replica in replicas:
        for setup, host in zip(replica.setups, replica.hosts, strict=True):
            if setup.memory is not None:
                yield setup, setup.memory, host


def _check_fits(rank: _PlacedRank) -> None:
    """Raise LaunchError unless a rank has room beside a context as long as was asked for, else the shortest."""
    setup, memory = rank.setup, rank.memory
    groups = setup.layout.groups
    cache = (ceil_div(ceil_div(memory.min_context, setup.block_size), groups) + 1) * memory.block + memory.states
    tables = memory.min_context * memory.position
    if memory.weights + memory.activations + cache + tables > rank.free:
        parts = {
            "weights": memory.weights,
            "activations": memory.activations,
            "rotary tables": tables,
            "the KV cache of one sequence": cache,
        }
        takes = ", ".join(f"{name} {_mib(num_bytes)}" for name, num_bytes in parts.items() if num_bytes)
        raise LaunchError(
            f"{_name(rank)} has too little memory: it takes {takes}, and as one of {rank.num_there} "
            f"ranks there it can have {_mib(rank.free)}; take hosts with more, more of them, or lower "
            "--max-num-batched-tokens, --max-num-seqs or --max-model-len"
        )


def _blocks_of(rank: _PlacedRank) -> int:
    setup, memory = rank.setup, rank.memory
    found = memory.num_blocks(rank.free, block_size=setup.block_size, longest=setup.max_model_len)
    if found < 2 or _capacity(setup, found) < memory.min_context:
        raise LaunchError(
            f"{_name(rank)}: of the {_mib(rank.free)} that it can have as one of {rank.num_there} ranks there, the KV "
            f"cache gets {found:,} blocks of {memory.block:,} bytes, too few for a context of {memory.min_context:,} "
            "tokens; give --kv-memory, or lower --max-model-len"
        )
    return found


def _capacity(setup: WorkerSetup, num_blocks: int) -> int:
    return context_capacity(num_blocks, setup.block_size, setup.layout.groups, setup.kv_shard_tokens)


def _name(rank: _PlacedRank) -> str:
    host, setup = rank.host, rank.setup
    return f"rank {setup.rank} of replica {setup.replica} on {host.host} ({host.address})"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes >> 20:,} MiB" if num_bytes >= 1 << 20 else f"{num_bytes:,} bytes"
