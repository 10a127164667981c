"""Whether a JSON schema is well-formed: at every depth its keywords have values of the right types.

Which keywords a grammar can follow is checked where one is made. The library jsonschema takes 200 times as long for
this, and other requests would wait meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eventlm.errors import InputError

#: Deeper than what people write, and well within the interpreter's own limit.
MAX_DEPTH = 64
#: Schemas within the schemas of one request. Other requests wait while they are checked, which takes some 30 ms.
MAX_SCHEMAS = 16_384
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
#: Keywords whose value is an object of schemas, a list of schemas, or one schema. `items` may be either of the latter.
_OF_OBJECTS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_OF_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_OF_ONE = frozenset(
    {"additionalProperties", "contains", "not", "if", "then", "else", "propertyNames", "unevaluatedProperties",
     "unevaluatedItems", "items"}
)  # fmt: skip
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})


class SchemaChecker:
    """Checks the schemas of one request."""

    def __init__(self) -> None:
        self._num_schemas = 0

    def check(self, schema: Any, path: str, depth: int = 0) -> None:
        """Raise InputError with the path of the first mistake."""
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
            self._check_value(keyword, value, f"{path}.{keyword}", depth + 1)

    def _check_value(self, keyword: str, value: Any, path: str, depth: int) -> None:
        if keyword in _OF_OBJECTS:
            if not isinstance(value, dict):
                raise _wrong(path, "expected an object of schemas")
            for name, schema in value.items():
                self.check(schema, f"{path}.{name}", depth)
        elif keyword in _OF_LISTS or (keyword == "items" and isinstance(value, list)):
            # In older drafts `items` may be an empty list.
            if not isinstance(value, list) or not (value or keyword == "items"):
                raise _wrong(path, "expected a list of schemas that is not empty")
            for index, schema in enumerate(value):
                self.check(schema, f"{path}[{index}]", depth)
        elif keyword in _OF_ONE:
            self.check(value, path, depth)
        elif keyword in _VALUES:
            is_right, problem = _VALUES[keyword]
            if not is_right(value):
                raise _wrong(path, problem)


def without_annotations(schema: Any) -> Any:
    """A checked schema without the texts that are meant for its reader."""
    if not isinstance(schema, dict):
        return schema
    return {keyword: _bare(keyword, value) for keyword, value in schema.items() if keyword not in _ANNOTATIONS}


def _bare(keyword: str, value: Any) -> Any:
    if keyword in _OF_OBJECTS:
        return {name: without_annotations(part) for name, part in value.items()}
    if isinstance(value, list) and (keyword in _OF_LISTS or keyword == "items"):
        return [without_annotations(part) for part in value]
    return without_annotations(value) if keyword in _OF_ONE else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


def _wrong(param: str, problem: str) -> InputError:
    return InputError(param, f"Invalid value for '{param}': {problem}.")


#: For other keywords, what accepts their values, and the message for those that it does not accept.
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, f"the types are {', '.join(_TYPES)}"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "expected a list of values that is not empty"),
    "required": (
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "expected a list of strings",
    ),
    **dict.fromkeys(
        ("pattern", "$ref", "format", "description", "title"),
        (lambda value: isinstance(value, str), "expected a string"),
    ),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), (_is_number, "expected a number")),
    # Draft 4 has booleans as exclusive bounds.
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"),
        (lambda value: isinstance(value, bool) or _is_number(value), "expected a number"),
    ),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        (lambda value: _is_number(value) and value >= 0, "expected a number of at least 0"),
    ),
}
