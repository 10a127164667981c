"""Keeps the indices of runs, so that a run is indexed once: files in `index/` of the cache folder.

A file's name is a hash of the trace's path and content, of the code that made the index, and of how it was made. So a
trace that was damaged since is read again, and that says so. The cache never stops anybody: a file that is broken is
made anew, and a folder that cannot be written is left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash
from msgspec import Struct

import eventlm
from eventlm.models.fetch.cache_folder import cache_folder
from eventlm.replay.index.file import FORMAT_VERSION, BrokenIndexError, IndexContent, read_index, write_index
from eventlm.system.source_hash import source_hash

#: The least recently used files go first.
MAX_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 20
#: Sources that an index depends on, relative to the package's folder.
_CODE = ("core", "events", "policies", "config", "metrics", "replay/index", "replay/verify", "replay/rebuild.py")


class IndexKey(Struct, frozen=True, kw_only=True):
    """Everything that an index depends on. path: warnings name it. content: a hash of all bytes of the trace.
    plugins: hashes of their sources as they are now; empty for an index from the log alone.
    """

    path: str
    content: str
    is_verified: bool
    plugins: list[str]
    code: str
    format: int = FORMAT_VERSION


def index_folder() -> Path:
    """Where the files are."""
    return cache_folder() / "index"


def index_key(path: str, segments: Sequence[Path], *, is_verified: bool, plugins: list[str]) -> IndexKey:
    """The key of a trace as it is now. Reads all of it, at some GB a second. Raises OSError."""
    digest = xxhash.xxh3_128()
    for segment in segments:
        with segment.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        digest.update(b"\0end of segment\0")
    return IndexKey(
        path=path,
        content=digest.hexdigest(),
        is_verified=is_verified,
        plugins=plugins,
        code=source_hash(Path(eventlm.__file__).parent, _CODE),
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
