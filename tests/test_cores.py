"""How many threads a worker gets where a control group gives less than the machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eventlm.cores import usable_cores


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
