"""Whether a JSON schema is one: its keywords have values of the right types, at every depth.

Which keywords a grammar can follow is another question, asked where one is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eventlm.errors import InputError

#: Deeper than what people write, and well within the interpreter's own limit.
MAX_DEPTH = 64
#: Schemas within the schemas of one request, which are checked while others wait: some 30 ms' work.
MAX_SCHEMAS = 16_384
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


class SchemaChecker:
    """Checks the schemas of one request."""

    def __init__(self) -> None:
        self._num_schemas = 0

    def check(self, schema: Any, path: str, depth: int = 0) -> None:
        """Raise InputError with the path of the first thing that no schema has."""
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise _wrong(path, f"a request has at most {MAX_SCHEMAS} schemas within its schemas")
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise _wrong(path, "a schema is an object or a boolean")
        if depth > MAX_DEPTH:
            raise _wrong(path, f"schemas are nested at most {MAX_DEPTH} deep")
        for keyword, value in schema.items():
            check = _CHECKS.get(keyword)
            if check is not None:
                check(self, value, f"{path}.{keyword}", depth)

    def _by_name(self, value: Any, path: str, depth: int) -> None:
        if not isinstance(value, dict):
            raise _wrong(path, "expected an object of schemas")
        for name, schema in value.items():
            self.check(schema, f"{path}.{name}", depth + 1)

    def _list(self, value: Any, path: str, depth: int) -> None:
        if not isinstance(value, list) or not value:
            raise _wrong(path, "expected a list of schemas that is not empty")
        for place, schema in enumerate(value):
            self.check(schema, f"{path}[{place}]", depth + 1)

    def _one(self, value: Any, path: str, depth: int) -> None:
        self.check(value, path, depth + 1)

    def _items(self, value: Any, path: str, depth: int) -> None:
        """Older drafts have lists of schemas here, which may be empty."""
        if value != []:
            (self._list if isinstance(value, list) else self._one)(value, path, depth)


def _type(checker: SchemaChecker, value: Any, path: str, depth: int) -> None:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name in _TYPES for name in names):
        raise _wrong(path, f"the types are {', '.join(_TYPES)}")


def _enum(checker: SchemaChecker, value: Any, path: str, depth: int) -> None:
    if not isinstance(value, list) or not value:
        raise _wrong(path, "expected a list of values that is not empty")


def _names(checker: SchemaChecker, value: Any, path: str, depth: int) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _wrong(path, "expected a list of strings")


def _string(checker: SchemaChecker, value: Any, path: str, depth: int) -> None:
    if not isinstance(value, str):
        raise _wrong(path, "expected a string")


def _number(checker: SchemaChecker, value: Any, path: str, depth: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(path, "expected a number")


def _bound(checker: SchemaChecker, value: Any, path: str, depth: int) -> None:
    """Draft 4 has booleans as exclusive bounds."""
    if not isinstance(value, bool):
        _number(checker, value, path, depth)


def _count(checker: SchemaChecker, value: Any, path: str, depth: int) -> None:
    _number(checker, value, path, depth)
    if value < 0:
        raise _wrong(path, "expected a number of at least 0")


def _wrong(param: str, problem: str) -> InputError:
    return InputError(param, f"Invalid value for '{param}': {problem}.")


def without_annotations(schema: Any) -> Any:
    """A checked schema without the words that are meant for its reader."""
    if not isinstance(schema, dict):
        return schema
    return {name: _parts_without(name, value) for name, value in schema.items() if name not in _ANNOTATIONS}


def _parts_without(keyword: str, value: Any) -> Any:
    check = _CHECKS.get(keyword)
    if check is SchemaChecker._by_name:
        return {name: without_annotations(part) for name, part in value.items()}
    if isinstance(value, list) and check in (SchemaChecker._list, SchemaChecker._items):
        return [without_annotations(part) for part in value]
    return without_annotations(value) if check in (SchemaChecker._one, SchemaChecker._items) else value


_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
_Check = Callable[[SchemaChecker, Any, str, int], None]
_KEYWORDS: tuple[tuple[_Check, tuple[str, ...]], ...] = (
    (SchemaChecker._by_name, ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")),
    (SchemaChecker._list, ("allOf", "anyOf", "oneOf", "prefixItems")),
    (
        SchemaChecker._one,
        ("additionalProperties", "contains", "not", "if", "then", "else", "propertyNames", "unevaluatedProperties",
         "unevaluatedItems"),
    ),
    (SchemaChecker._items, ("items",)),
    (_type, ("type",)),
    (_enum, ("enum",)),
    (_names, ("required",)),
    (_string, ("pattern", "$ref", "format", "description", "title")),
    (_number, ("minimum", "maximum", "multipleOf")),
    (_bound, ("exclusiveMinimum", "exclusiveMaximum")),
    (_count, ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")),
)  # fmt: skip
_CHECKS: dict[str, _Check] = {keyword: check for check, keywords in _KEYWORDS for keyword in keywords}
