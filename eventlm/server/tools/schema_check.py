"""Whether a JSON schema is one: its keywords have values of the right types, at every depth.

Which keywords a grammar can follow is another question, asked where one is made.
"""

from __future__ import annotations

from typing import Any

from eventlm.server.errors import ApiError, invalid_value

#: Deeper than what people write, and well within the interpreter's own limit.
MAX_DEPTH = 64
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = (
    "additionalProperties", "items", "contains", "not", "if", "then", "else", "propertyNames",
    "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def check_schema(schema: Any, path: str, depth: int = 0) -> None:
    """Raise ApiError with the path of the first thing that no schema has."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _wrong(path, "a schema is an object or a boolean")
    if depth > MAX_DEPTH:
        raise _wrong(path, f"schemas are nested at most {MAX_DEPTH} deep")
    _check_keywords(schema, path)
    for name in _SCHEMAS_BY_NAME:
        children = schema.get(name, {})
        if not isinstance(children, dict):
            raise _wrong(f"{path}.{name}", "expected an object of schemas")
        for key, child in children.items():
            check_schema(child, f"{path}.{name}.{key}", depth + 1)
    for name in _LISTS_OF_SCHEMAS:
        if name in schema:
            if not isinstance(schema[name], list) or not schema[name]:
                raise _wrong(f"{path}.{name}", "expected a list of schemas that is not empty")
            for place, child in enumerate(schema[name]):
                check_schema(child, f"{path}.{name}[{place}]", depth + 1)
    for name in _SCHEMAS:
        # Older drafts have lists of schemas as `items`.
        if name in schema and not (name == "items" and isinstance(schema[name], list)):
            check_schema(schema[name], f"{path}.{name}", depth + 1)


def _check_keywords(schema: dict[str, Any], path: str) -> None:
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not types or not all(isinstance(name, str) and name in _TYPES for name in types):
            raise _wrong(f"{path}.type", f"the types are {', '.join(_TYPES)}")
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        raise _wrong(f"{path}.enum", "expected a list of values that is not empty")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise _wrong(f"{path}.required", "expected a list of strings")
    for name in ("pattern", "$ref", "format", "description", "title"):
        if not isinstance(schema.get(name, ""), str):
            raise _wrong(f"{path}.{name}", "expected a string")
    for name in (*_COUNTS, *_NUMBERS):
        value = schema.get(name, 0)
        # Draft 4 has booleans as exclusive bounds.
        if isinstance(value, bool) and name.startswith("exclusive"):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _wrong(f"{path}.{name}", "expected a number")
        if name in _COUNTS and value < 0:
            raise _wrong(f"{path}.{name}", "expected a number of at least 0")


def _wrong(param: str, problem: str) -> ApiError:
    return invalid_value(param, f"Invalid value for '{param}': {problem}.")
