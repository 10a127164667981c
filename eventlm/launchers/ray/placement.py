"""What a replica asks of a cluster's nodes, and the words for what they lack. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from msgspec import Struct

from eventlm.formatting import counted

#: How Ray deals the bundles of a replica out to nodes. `strict_`: it is no wish.
Strategy = Literal["pack", "strict_pack", "spread", "strict_spread"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
#: Whose ranks are in one bundle, and so on one node.
BundleOf = Literal["tensor_group", "rank"]


class Bundle(Struct, frozen=True):
    """What ranks that must be on one node need together: processors and GPUs."""

    ranks: int
    cpus: int
    gpus: int = 0

    @property
    def resources(self) -> dict[str, int]:
        """As Ray counts them."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})

    def __str__(self) -> str:
        needs = [counted(self.cpus, "CPU")] * (self.cpus > 0) + [counted(self.gpus, "GPU")] * (self.gpus > 0)
        return " and ".join(needs)


class NodeRoom(Struct, frozen=True):
    """A node of the cluster: its name and address, and what it has and has left."""

    host: str
    address: str
    cpus: float
    free_cpus: float
    gpus: float = 0
    free_gpus: float = 0

    def could_hold(self, bundle: Bundle) -> bool:
        """Whether it has room for a bundle when nothing else is there."""
        return self.cpus >= bundle.cpus and self.gpus >= bundle.gpus

    def __str__(self) -> str:
        gpus = f" and {self.free_gpus:g} of {counted(round(self.gpus), 'GPU')}" if self.gpus else ""
        return f"{self.host} ({self.address}) {self.free_cpus:g} of {counted(round(self.cpus), 'CPU')}{gpus}"


def bundles_of(num_bundles: int, ranks: int, threads: int, *, on_gpu: bool) -> list[Bundle]:
    """So many bundles, each of `ranks` ranks. A rank on a GPU needs one processor."""
    bundle = Bundle(ranks, ranks, ranks) if on_gpu else Bundle(ranks, ranks * threads)
    return [bundle] * num_bundles


def most_threads(nodes: Sequence[NodeRoom], strategy: Strategy, replicas: int, num_bundles: int, ranks: int) -> int:
    """With how many threads a rank all replicas have room; 1 if they have none with one either."""
    threads = 1
    while _fits(nodes, strategy, replicas, num_bundles, ranks * (threads + 1)):
        threads += 1
    return threads


def _fits(nodes: Sequence[NodeRoom], strategy: Strategy, replicas: int, num_bundles: int, cpus: int) -> bool:
    """Whether so many replicas of bundles of `cpus` processors have room."""
    room = [int(node.free_cpus) // cpus for node in nodes]
    if strategy == "strict_pack":
        return sum(each // num_bundles for each in room) >= replicas
    if strategy == "strict_spread":
        room = [min(each, replicas) for each in room]
    return sum(room) >= replicas * num_bundles


def no_room(
    replica: int, bundles: Sequence[Bundle], strategy: Strategy, nodes: Sequence[NodeRoom], held: Sequence[Bundle]
) -> str:
    """One line: what a replica needs, and what each node has free. held: what other replicas of its engine have."""
    free = "; ".join(map(str, nodes)) or "no node has joined"
    message = f"Ray has no room for replica {replica}: it needs {_needs(bundles)} (placement={strategy}); free: {free}"
    if held:
        total = Bundle(0, cpus=sum(each.cpus for each in held), gpus=sum(each.gpus for each in held))
        message += f"; other replicas of this engine hold {total}"
    if bundles[0].ranks > 1 and not any(node.could_hold(bundles[0]) for node in nodes):
        message += (
            f"; no node is large enough for the {bundles[0].ranks} ranks of a tensor group: lower "
            "--tensor-parallel-size or --threads, or give bundle=rank, which lets them be on several"
        )
    return message


def _needs(bundles: Sequence[Bundle]) -> str:
    first = bundles[0]
    if first.ranks == 1:
        whose = f"each of {len(bundles)} ranks" if len(bundles) > 1 else "its rank"
        return f"{first} for {whose}"
    whose = f"each of {len(bundles)} tensor groups" if len(bundles) > 1 else f"its {first.ranks} ranks"
    return f"{first} on one host for {whose}"
