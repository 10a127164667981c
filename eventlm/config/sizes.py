"""Sizes of memory and files as users write them."""

from __future__ import annotations

import re

#: What a size looks like.
PATTERN = r"[0-9]+(\.[0-9]+)?(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)"

_UNITS = {"B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate(("K", "M", "G", "T"), start=1)
}
_SIZE = re.compile(r"([0-9.]+)([A-Za-z]+)")


def memory_bytes(size: str) -> int:
    """Bytes of a size such as `512MiB` or `1.5GB`, as the configuration has checked it."""
    match = _SIZE.fullmatch(size)
    assert match is not None, size
    return int(float(match[1]) * _UNITS[match[2]])
