from __future__ import annotations

import re

import pytest

from eventlm.config.sizes import PATTERN, memory_bytes


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
    assert re.fullmatch(PATTERN, size)
    assert memory_bytes(size) == expected


@pytest.mark.parametrize("size", ["", "5", "MiB", "-1KB", "1 KB", "1kb", "1PB", "1.KB", ".5KB", "1e3B"])
def test_what_is_no_size(size: str) -> None:
    assert re.fullmatch(PATTERN, size) is None
