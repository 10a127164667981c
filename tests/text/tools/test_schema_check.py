"""Schemas without what is meant for their readers; that they are checked is tested through `tools`."""

from __future__ import annotations

from eventlm.text.tools.schema_check import SchemaChecker, without_annotations


def test_annotations_go_and_properties_of_their_names_stay() -> None:
    schema = {
        "title": "T",
        "properties": {
            "description": {"type": "string", "description": "d"},
            "title": True,
            "a": {"items": {"default": 1, "type": "integer"}, "anyOf": [{"title": "x", "enum": ["title"]}, False]},
        },
        "additionalProperties": {"examples": [1], "not": {"$comment": "c"}},
        "items": [{"title": "t", "const": {"title": "kept"}}],
        "required": ["title"],
    }
    SchemaChecker().check(schema, "p")
    assert without_annotations(schema) == {
        "properties": {
            "description": {"type": "string"},
            "title": True,
            "a": {"items": {"type": "integer"}, "anyOf": [{"enum": ["title"]}, False]},
        },
        "additionalProperties": {"not": {}},
        "items": [{"const": {"title": "kept"}}],
        "required": ["title"],
    }
