"""Sections of the configuration: the options of GPUs, and sizes of memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eventlm.config.core import MAX_NUMBER
from eventlm.config.load import load_config, to_toml
from eventlm.config.structs import SIZE_PATTERN, WorkerConfig, memory_bytes
from eventlm.errors import UsageError


@pytest.mark.parametrize(
    ("given", "ppm"),
    [
        ("0.9", 900_000),
        (0.9, 900_000),
        (".85", 850_000),
        ("0.123456", 123_456),
        ("0.000001", 1),
        (1, 1_000_000),
        ("1.0", 1_000_000),
        (0.5, 500_000),
    ],
)
def test_a_share_of_the_memory_is_exact_in_parts_per_million(given: object, ppm: int) -> None:
    assert load_config(None, {"gpu_memory_utilization": given}, environment={}).gpu.memory_ppm == ppm


def test_without_a_share_given_it_is_that_of_the_field() -> None:
    assert load_config(None, environment={}).gpu.memory_ppm == 900_000


@pytest.mark.parametrize(
    "given", ["0", "0.0", "-0.5", "1.5", "1.000001", "90%", "0.1234567", "", 0, 1.2, 90, True, "."]
)
def test_what_is_no_share_is_refused(given: object) -> None:
    with pytest.raises(UsageError, match=r"--gpu-memory-utilization .*: must be a share above 0 and up to 1, such as"):
        load_config(None, {"gpu_memory_utilization": given}, environment={})


def test_a_file_may_have_the_share_as_a_number(tmp_path: Path) -> None:
    path = tmp_path / "eventlm.toml"
    path.write_text("[gpu]\ngpu_memory_utilization = 0.75\n")
    config = load_config(path, environment={})
    assert config.gpu.gpu_memory_utilization == "0.75"
    path.write_text(to_toml(config))
    assert load_config(path, environment={}) == config


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("0B", 0),
        ("7B", 7),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("512MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("0.5GiB", 1 << 29),
        ("2TB", 2 * 10**12),
        ("1TiB", 1 << 40),
        ("0.3B", 0),
    ],
)
def test_bytes_of_a_size(size: str, expected: int) -> None:
    assert re.fullmatch(SIZE_PATTERN, size)
    assert memory_bytes(size) == expected


@pytest.mark.parametrize("size", ["", "5", "MiB", "-1KB", "1 KB", "1kb", "1PB", "1.KB", ".5KB", "1e3B"])
def test_what_is_no_size(size: str) -> None:
    assert re.fullmatch(SIZE_PATTERN, size) is None


@pytest.mark.parametrize(
    ("silence_seconds", "step_seconds", "heartbeat_ms"),
    [
        (20, 600, 1000),
        (1, 600, 250),
        (3, 600, 750),
        (20, 1, 1000),
        (300, 600, 15_000),
        (600, 40, 2000),
        (600, 600, 30_000),
        (MAX_NUMBER, MAX_NUMBER, 30_000),
    ],
)
def test_heartbeats_are_rarer_where_patience_is_long(
    silence_seconds: int, step_seconds: int, heartbeat_ms: int
) -> None:
    worker = WorkerConfig(heartbeat_timeout_seconds=silence_seconds, step_timeout_seconds=step_seconds)
    assert worker.heartbeat_ns == heartbeat_ms * 1_000_000
