"""The small JSON files of a checkpoint, read and checked key by key. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from eventlm.errors import CheckpointError
from eventlm.models.safetensors_header import not_downloaded

_StructT = TypeVar("_StructT", bound=msgspec.Struct)
#: Of a value that is shown in a message.
_MAX_SHOWN = 60


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; CheckpointError if it is missing, unreadable, or holds something else."""
    try:
        content = path.read_bytes()
        values = msgspec.json.decode(content)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; a checkpoint folder has one") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {not_downloaded(content) or f'not valid JSON: {error}'}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: holds {_shown(values)}, not a JSON object")
    return values


def convert_object(values: dict[str, Any], type_: type[_StructT], path: Path, *, inside: str = "") -> _StructT:
    """The fields of `type_` out of the object that `path` holds, or that it holds under the key `inside`.

    Raises CheckpointError that says which file, which key, what it holds and what it must be.
    """
    for field in msgspec.structs.fields(type_):
        key = f"{inside}.{field.encode_name}" if inside else field.encode_name
        if field.encode_name not in values:
            if field.required:
                raise CheckpointError(f"{path}: {key} is missing; it must be {_in_words(field.type)}")
            continue
        value = values[field.encode_name]
        try:
            msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{path}: {key} is {_shown(value)}; it must be {_in_words(field.type)}") from error
    return msgspec.convert(values, type_)


def _shown(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _in_words(type_: Any) -> str:
    """A field's type as the end of a sentence: "an integer of at least 1, or null"."""
    return _described(inspect.type_info(type_))


def _described(type_: inspect.Type) -> str:
    match type_:
        case inspect.UnionType():
            others = [_described(each) for each in type_.types if not isinstance(each, inspect.NoneType)]
            return ", or ".join(others + ["null"] * (len(others) < len(type_.types)))
        case inspect.IntType():
            return "an integer" + _range(type_)
        case inspect.FloatType():
            return "a number" + _range(type_)
        case inspect.ListType():
            return f"a list of {_described(type_.item_type).split()[1]}s"
        case inspect.BoolType():
            return "true or false"
        case inspect.DictType():
            return "an object"
        case _:
            return "a string"


def _range(type_: inspect.IntType | inspect.FloatType) -> str:
    if type_.ge is not None and type_.le is not None:
        return f" from {type_.ge:g} to {type_.le:g}"
    if type_.gt is not None and type_.le is not None:
        return f" above {type_.gt:g} and at most {type_.le:g}"
    return f" of at least {type_.ge:g}" if type_.ge is not None else ""
