"""Keeps the indices of runs, so that a run is indexed once: files in `index/` of the cache folder.

A file's name is a hash of the run's last hash, of the code that made the index, and of how it was made. It never stops
anybody: a file that is broken is made anew, and a folder that cannot be written is left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct

import eventlm
from eventlm.events import Header
from eventlm.models.fetch.cache_folder import cache_folder
from eventlm.replay.index.file import FORMAT_VERSION, BrokenIndexError, IndexContent, read_index, write_index

#: The least recently used files go first.
MAX_BYTES = 1 << 30
#: Sources that an index depends on, relative to the package's folder.
_CODE = ("core", "events", "policies", "config", "metrics", "replay/index", "replay/verify", "replay/rebuild.py")


class IndexKey(Struct, frozen=True, kw_only=True):
    """Everything that an index depends on. tail: position and hash of the log's last line. plugins: hashes of their
    sources as they are now; empty for an index from the log alone."""

    header: str
    tail: tuple[int, str]
    num_bytes: int
    is_verified: bool
    plugins: list[str]
    code: str
    format: int = FORMAT_VERSION


def index_folder() -> Path:
    """Where the files are."""
    return cache_folder() / "index"


def index_key(
    header: Header, tail: tuple[int, str], num_bytes: int, *, is_verified: bool, plugins: list[str]
) -> IndexKey:
    """The key of a run as it is now."""
    return IndexKey(
        header=_hash(msgspec.json.encode(header)),
        tail=tail,
        num_bytes=num_bytes,
        is_verified=is_verified,
        plugins=plugins,
        code=code_hash(Path(eventlm.__file__).parent),
    )


def read_cached(key: IndexKey) -> IndexContent | None:
    """The index of a run; None if it is not kept."""
    path = _path(key)
    try:
        content = read_index(path)
    except (OSError, BrokenIndexError):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return content


def keep(key: IndexKey, content: IndexContent) -> None:
    """Keep an index as far as there is room."""
    path = _path(key)
    with contextlib.suppress(OSError):
        write_index(path, content)
        _remove_oldest(path)


def _remove_oldest(newest: Path) -> None:
    ages = []
    for path in newest.parent.glob("*.index"):
        with contextlib.suppress(OSError):
            status = path.stat()
            ages.append((path == newest, status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, _, size, _ in ages)
    for _, _, size, path in sorted(ages):
        if total <= MAX_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= size


def _path(key: IndexKey) -> Path:
    return index_folder() / f"{_hash(msgspec.json.encode(key))}.index"


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@cache
def code_hash(package: Path) -> str:
    """A hash of the sources that an index depends on, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for part in _CODE:
        path = package / part
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"\0{file.relative_to(package)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
