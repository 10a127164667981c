"""How much memory there is, by files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.errors import UsageError
from eventlm.system.free_memory import free_bytes, total_bytes


def machine(folder: Path, num_bytes: int) -> Path:
    path = folder / "meminfo"
    path.write_text(f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {num_bytes // 1024} kB\n")
    return path


def group(folder: Path, limit: str, usage: int, stat: str = "") -> Path:
    folder.mkdir()
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    if stat:
        (folder / "memory.stat").write_text(stat)
    return folder


def test_of_a_machine_without_limits(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert free_bytes(machine(tmp_path, 1 << 30), [], nowhere) == 1 << 30
    assert free_bytes(machine(tmp_path, 1 << 30), [nowhere, group(tmp_path / "g", "max", 5)], nowhere) == 1 << 30
    with pytest.raises(UsageError, match="does not say how much memory there is"):
        free_bytes(nowhere, [], nowhere)
    assert free_bytes() > 0


def test_the_narrowest_group_counts(tmp_path: Path) -> None:
    groups = [group(tmp_path / "own", "5000", 1000), group(tmp_path / "around", "9000", 6000)]
    assert free_bytes(machine(tmp_path, 1 << 30), groups, tmp_path / "nowhere") == 3000
    assert free_bytes(machine(tmp_path, 2048), groups, tmp_path / "nowhere") == 2048


def test_files_that_were_read_give_way(tmp_path: Path) -> None:
    own = group(tmp_path / "own", "5000", 4900, "anon 400\ninactive_file 3000\nactive_file 1000\n")
    assert free_bytes(machine(tmp_path, 1 << 30), [own], tmp_path / "nowhere") == 4100
    over = group(tmp_path / "over", "5000", 6000)
    assert free_bytes(machine(tmp_path, 1 << 30), [over], tmp_path / "nowhere") == 0


def test_groups_of_version_1(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("7000\n")
    (folder / "memory.usage_in_bytes").write_text("1000\n")
    assert free_bytes(machine(tmp_path, 1 << 30), [], folder) == 6000


def test_all_of_memory(tmp_path: Path) -> None:
    nowhere, meminfo = tmp_path / "nowhere", machine(tmp_path, 1 << 20)
    assert total_bytes(meminfo, [nowhere], nowhere) == 99999999 * 1024
    groups = [group(tmp_path / "own", "max", 1000), group(tmp_path / "around", "9000", 6000)]
    assert total_bytes(meminfo, groups, nowhere) == 9000
    (tmp_path / "memory.limit_in_bytes").write_text("7000\n")
    assert total_bytes(meminfo, groups, tmp_path) == 7000
    with pytest.raises(UsageError, match="does not say how much memory there is"):
        total_bytes(nowhere, [], nowhere)
    assert total_bytes() >= free_bytes()
