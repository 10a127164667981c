"""`2.0` where an integer is wanted: JSON has one kind of number only, and some clients' numbers are all floats."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from msgspec import Struct, inspect

#: A decoded JSON value with what is to be an integer as one.
_Reader = Callable[[Any], Any]


def with_integers(raw: dict[str, Any], type_: type[Struct]) -> dict[str, Any]:
    """A decoded object with whole numbers as integers wherever `type_` has integers and no floats.

    All else stays as it is: `2.5`, texts, and what the type says nothing of.
    """
    read = _struct_reader(type_)
    return raw if read is None else read(raw)


@functools.cache
def _struct_reader(type_: type[Struct]) -> _Reader | None:
    return _reader(inspect.type_info(type_))


def _reader(type_: inspect.Type) -> _Reader | None:
    """What reads values of a type; None if there are no integers in it."""
    kinds = _kinds(type_)
    by_type: dict[type, _Reader] = {}
    if inspect.IntType in kinds and inspect.FloatType not in kinds:
        by_type[float] = _whole_number
    if inspect.ListType in kinds and (read_item := _reader(kinds[inspect.ListType].item_type)) is not None:
        by_type[list] = lambda values: [read_item(value) for value in values]
    if inspect.DictType in kinds and (read_value := _reader(kinds[inspect.DictType].value_type)) is not None:
        by_type[dict] = lambda values: {key: read_value(value) for key, value in values.items()}
    if inspect.StructType in kinds and (readers := _field_readers(kinds[inspect.StructType])):
        by_type[dict] = lambda values: {
            key: readers[key](value) if key in readers else value for key, value in values.items()
        }
    if not by_type:
        return None

    def read(value: Any) -> Any:
        found = by_type.get(type(value))
        return value if found is None else found(value)

    return read


def _field_readers(struct: inspect.StructType) -> dict[str, _Reader]:
    readers = {field.encode_name: _reader(field.type) for field in struct.fields}
    return {name: read for name, read in readers.items() if read is not None}


def _kinds(type_: inspect.Type) -> dict[type[inspect.Type], Any]:
    """The types that a value may have, by their kinds."""
    if isinstance(type_, inspect.Metadata):
        return _kinds(type_.type)
    if isinstance(type_, inspect.UnionType):
        return {kind: found for each in type_.types for kind, found in _kinds(each).items()}
    return {type(type_): type_}


def _whole_number(value: float) -> float | int:
    return int(value) if value.is_integer() else value
