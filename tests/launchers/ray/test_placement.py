"""What replicas ask of a cluster's nodes."""

from __future__ import annotations

import pytest

from eventlm.launchers.ray.placement import STRATEGIES, Bundle, NodeRoom, Strategy, bundles_of, most_threads, no_room


def node(cpus: float, *, host: str = "box", free: float | None = None, gpus: int = 0) -> NodeRoom:
    """A node of so many processors."""
    left = cpus if free is None else free
    return NodeRoom(host, "10.0.0.1", cpus=cpus, free_cpus=left, gpus=gpus, free_gpus=gpus)


def test_a_tensor_group_is_one_bundle() -> None:
    assert bundles_of(3, 2, 4, on_gpu=False) == [Bundle(ranks=2, cpus=8)] * 3
    assert bundles_of(1, 2, 4, on_gpu=True) == [Bundle(ranks=2, cpus=2, gpus=2)]


def test_what_ray_is_asked_for() -> None:
    assert Bundle(ranks=2, cpus=8).resources == {"CPU": 8}
    assert Bundle(ranks=2, cpus=2, gpus=2).resources == {"CPU": 2, "GPU": 2}


@pytest.mark.parametrize(
    ("strategy", "replicas", "bundles", "ranks", "threads"),
    [
        # Two nodes of 8 processors.
        ("pack", 1, 1, 2, 4),
        ("pack", 1, 2, 1, 8),
        ("pack", 2, 2, 1, 4),
        ("pack", 1, 3, 1, 4),
        ("strict_pack", 1, 2, 1, 4),
        ("strict_pack", 2, 2, 1, 4),
        ("strict_pack", 3, 2, 1, 2),
        ("strict_spread", 1, 2, 1, 8),
        # No replica may have two bundles on one node.
        ("strict_spread", 1, 3, 1, 1),
        ("spread", 1, 3, 1, 4),
        # No room for one thread each.
        ("pack", 40, 1, 1, 1),
    ],
)
def test_as_many_threads_as_there_is_room_for(
    strategy: Strategy, replicas: int, bundles: int, ranks: int, threads: int
) -> None:
    assert most_threads([node(8), node(8)], strategy, replicas, bundles, ranks) == threads


def test_only_free_processors_count() -> None:
    assert most_threads([node(8, free=3.5)], "pack", 1, 1, 1) == 3


def test_all_strategies_are_known_to_ray() -> None:
    from ray.util.placement_group import VALID_PLACEMENT_GROUP_STRATEGIES

    assert {each.upper() for each in STRATEGIES} == set(VALID_PLACEMENT_GROUP_STRATEGIES)


def test_a_refusal_says_what_was_asked_for_and_what_is_free() -> None:
    nodes = [node(8, host="a", free=2), node(1, host="b", gpus=2)]
    held = bundles_of(3, 2, 1, on_gpu=False)
    assert no_room(3, bundles_of(2, 2, 2, on_gpu=False), "strict_pack", nodes, held) == (
        "Ray has no room for replica 3: it needs 4 CPUs on one host for each of 2 tensor groups "
        "(placement=strict_pack); free: a (10.0.0.1) 2 of 8 CPUs; b (10.0.0.1) 1 of 1 CPU and 2 of 2 GPUs; other "
        "replicas of this engine hold 6 CPUs"
    )
    assert no_room(0, bundles_of(1, 1, 1, on_gpu=True), "pack", [], []) == (
        "Ray has no room for replica 0: it needs 1 CPU and 1 GPU for its rank (placement=pack); free: no node has "
        "joined"
    )


@pytest.mark.parametrize(
    ("num_bundles", "ranks", "needs"),
    [(1, 3, "6 CPUs on one host for its 3 ranks"), (3, 1, "2 CPUs for each of 3 ranks")],
)
def test_a_refusal_says_what_each_needs(num_bundles: int, ranks: int, needs: str) -> None:
    bundles = bundles_of(num_bundles, ranks, 2, on_gpu=False)
    assert f": it needs {needs} (placement=pack); free: " in no_room(0, bundles, "pack", [node(8)], [])


def test_a_tensor_group_that_no_node_can_hold_is_told_what_to_do() -> None:
    nodes = [node(4, host="a"), node(4, host="b", free=0)]
    message = no_room(0, bundles_of(1, 3, 2, on_gpu=False), "pack", nodes, [])
    assert message.endswith(
        "; no node is large enough for the 3 ranks of a tensor group: lower --tensor-parallel-size or --threads, or "
        "give bundle=rank, which lets them be on several"
    )
    assert "bundle=rank" in no_room(0, bundles_of(1, 2, 1, on_gpu=True), "pack", nodes, [])
    # One of them could, and one rank has nothing to divide.
    assert "bundle=rank" not in no_room(0, bundles_of(2, 2, 2, on_gpu=False), "pack", nodes, [])
    assert "bundle=rank" not in no_room(0, bundles_of(1, 1, 8, on_gpu=False), "pack", nodes, [])
