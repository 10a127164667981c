"""A hash of source files: keeps what was computed by other code from being used again."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path


@cache
def source_hash(package: Path, parts: tuple[str, ...]) -> str:
    """Of the Python files in `parts`, files and folders relative to `package`: 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        path = package / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"\0{file.relative_to(package)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
