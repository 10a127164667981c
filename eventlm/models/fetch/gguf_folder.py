"""A folder in the cache for a GGUF file: its configuration and tokenizer as files, as any checkpoint has them.

It is made when the file is used for the first time, or was changed since. Weights are not copied to it: it says where
they lie. It is written under another name and renamed, so one that exists is complete.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from eventlm.errors import CheckpointError
from eventlm.models.config import model_of, weight_samples
from eventlm.models.fetch.cache_folder import cache_folder
from eventlm.models.gguf.config_json import SETTINGS, config_json
from eventlm.models.gguf.header import GgufHeader, part_paths, read_parts
from eventlm.models.gguf.source import SOURCE_FILE, GgufPart, GgufSource
from eventlm.models.gguf.tokenizer_json import tokenizer_files

#: Part of each folder's name; a change to what is written raises it.
_VERSION = 2
#: What a file's name may have and a folder's shall not, and how much of it is taken.
_UNUSUAL, _MOST_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]"), 100


def gguf_folder(path: Path) -> Path:
    """The checkpoint folder for a GGUF file, or for the parts of which it is one.

    Raises CheckpointError if it is damaged, or is no model that can be run, or the cache cannot be written.
    """
    paths = part_paths(path.absolute())
    root = cache_folder() / "gguf"
    folder = root / _name(paths)
    if not folder.is_dir():
        files = _files(read_parts(paths))
        try:
            _write(files, folder)
        except OSError as error:
            raise CheckpointError(
                f"cannot write to the cache {root}: {error.strerror or error}; make it writable, or set EVENTLM_HOME "
                "to another folder"
            ) from error
    return folder


def files_beside(path: Path) -> dict[str, bytes]:
    """The content of each file that makes the folder in which a GGUF file lies a checkpoint folder, by name.

    The folder may be copied or moved with all that it holds. Raises CheckpointError like `gguf_folder`.
    """
    return _files(read_parts([path]), is_beside=True)


def _name(paths: Sequence[Path]) -> str:
    """Begins with that of the first, for people, and is another for other files, and if one of them was changed."""
    digest = hashlib.blake2b(str(_VERSION).encode(), digest_size=8)
    for path in paths:
        try:
            found = path.stat()
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from error
        digest.update(f"\0{path}\0{found.st_size}\0{found.st_mtime_ns}".encode(errors="surrogateescape"))
    return f"{_UNUSUAL.sub('_', paths[0].stem)[:_MOST_CHARACTERS]}-{digest.hexdigest()}"


def _files(headers: Sequence[GgufHeader], *, is_beside: bool = False) -> dict[str, bytes]:
    """The content of each file of the folder. is_beside: the GGUF files lie in it as well."""
    first = headers[0]
    config = config_json(headers)
    model = model_of(config, first.path)
    source = GgufSource(
        architecture=first.need("general.architecture", str),
        fingerprint=_fingerprint(headers),
        parts=[
            GgufPart(
                header.path.name if is_beside else os.fspath(header.path),
                header.stamp.num_bytes,
                0 if is_beside else header.stamp.modified_ns,
                [tensor for tensor in header.tensors if tensor.name not in SETTINGS],
            )
            for header in headers
        ],
    )
    return {
        "config.json": msgspec.json.encode(config),
        SOURCE_FILE: msgspec.json.encode(source),
        **tokenizer_files(first, model.vocab_size),
    }


def _fingerprint(headers: Sequence[GgufHeader]) -> str:
    """A hash of the headers and of samples of the weights, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for header in headers:
        digest.update(header.raw)
        for page in weight_samples(header.path, len(header.raw), header.stamp.num_bytes):
            digest.update(page)
    return digest.hexdigest()


def _write(files: dict[str, bytes], folder: Path) -> None:
    staging = folder.with_name(f".{folder.name}.{os.getpid()}")
    staging.mkdir(parents=True, exist_ok=True)
    try:
        for name, content in files.items():
            with (staging / name).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        staging.rename(folder)
    except OSError:
        # Another process may have made the folder in the meantime.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
