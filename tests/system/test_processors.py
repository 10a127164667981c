"""How many threads a worker gets where a control group gives less than the machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eventlm.system.processors import compute_threads, deal_processors, spread_processors, usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def cores_with(tmp_path: Path, limits: dict[str, str], member: str = "0::/") -> int:
    for group, limit in limits.items():
        (tmp_path / "cgroup" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / group / "cpu.max").write_text(limit)
    (tmp_path / "membership").write_text(f"12:cpu:/old\n{member}\n")
    return usable_cores(tmp_path / "cgroup", tmp_path / "membership")


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("max 100000\n", 8), ("200000 100000\n", 2), ("250000 100000\n", 2), ("50000 100000\n", 1), ("1600000 100000", 8)],
)
def test_a_container(tmp_path: Path, limit: str, cores: int) -> None:
    assert cores_with(tmp_path, {"": limit}) == cores


def test_the_least_of_a_group_and_those_above_it(tmp_path: Path) -> None:
    limits = {"system": "300000 100000", "system/eventlm": "max 100000"}
    assert cores_with(tmp_path, limits, "0::/system/eventlm") == 3


@pytest.mark.parametrize("limit", ["", "nonsense", "a b"])
def test_what_cannot_be_read_is_no_limit(tmp_path: Path, limit: str) -> None:
    assert cores_with(tmp_path, {"": limit}) == 8


def test_without_control_groups(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none", tmp_path / "none") == 8


@pytest.mark.parametrize(
    ("num_workers", "num_cores", "threads"),
    # With more than four the engine has one of them.
    [(1, 1, 1), (1, 2, 2), (1, 4, 4), (1, 5, 4), (1, 64, 63), (2, 4, 2), (2, 16, 7), (8, 4, 1)],
)
def test_threads_of_a_worker(num_workers: int, num_cores: int, threads: int) -> None:
    assert compute_threads(num_workers, num_cores) == threads


def test_processors_are_spread_over_the_cores_that_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        (tmp_path / f"cpu{number}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{number}/topology/thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    assert spread_processors(tmp_path) == [0, 1, 2, 3, 4, 5, 6, 7]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 5, 7})
    assert spread_processors(tmp_path) == [1, 2, 7, 5]
    assert spread_processors(tmp_path / "none") == [1, 2, 5, 7]


def two_nodes(folder: Path) -> Path:
    """Four processors each, every second one on the other."""
    for number in range(8):
        (folder / f"node{number % 2}" / f"cpu{number}").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("num_workers", "num_threads", "dealt"),
    [
        (2, 4, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (4, 2, [[0, 2], [4, 6], [1, 3], [5, 7]]),
        (2, 3, [[0, 2, 4], [1, 3, 5]]),
        (1, 6, [[0, 1, 2, 3, 4, 5]]),
        (3, 3, []),
    ],
)
def test_a_worker_s_threads_are_on_one_node_if_one_has_room(
    tmp_path: Path, num_workers: int, num_threads: int, dealt: list[list[int]]
) -> None:
    assert deal_processors(num_workers, num_threads, two_nodes(tmp_path)) == dealt


def test_without_nodes_processors_are_dealt_in_order(tmp_path: Path) -> None:
    assert deal_processors(2, 2, tmp_path / "none") == [[0, 1], [2, 3]]
