"""The small JSON files of a checkpoint, read and checked. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from eventlm.errors import CheckpointError
from eventlm.field_errors import split_message
from eventlm.models.checkpoint.safetensors_header import not_downloaded

_StructT = TypeVar("_StructT", bound=msgspec.Struct)


def read_json_object(path: Path, *, required: bool = True) -> dict[str, Any]:
    """The JSON object in `path`; CheckpointError if it is unreadable or holds something else.

    If there is no such file: CheckpointError, or an empty object where it is not required.
    """
    if not required and not path.is_file():
        return {}
    try:
        content = path.read_bytes()
        return msgspec.json.decode(content, type=dict[str, Any])
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; a checkpoint folder has one") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {not_downloaded(content) or f'not a JSON object: {error}'}") from error


def convert_object(values: dict[str, Any], type_: type[_StructT], path: Path, *, inside: str = "") -> _StructT:
    """The fields of `type_` out of the object that `path` holds, or that it holds under the key `inside`.

    Raises CheckpointError naming the file, the key and what it must be.
    """
    try:
        return msgspec.convert(values, type_)
    except msgspec.ValidationError as error:
        problem, key = split_message(str(error))
        field = ".".join(filter(None, (inside, key)))
        raise CheckpointError(f"{path}: {field}{': ' if field else ''}{problem}") from error
