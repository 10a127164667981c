"""The vocabulary is frozen: `schema.json` lists every field of every event as it was when its version was set.

`python -m tests.events.test_schema` writes the file anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from eventlm.events import DECISIONS, FACTS, MARKERS, Event, Fact, Header
from eventlm.events.markers import FORMAT_VERSION, SCHEMA_VERSION

SNAPSHOT = Path(__file__).with_name("schema.json")
EVENTS: tuple[type[Event], ...] = (*FACTS, *DECISIONS, *MARKERS)

WHAT_TO_DO = (
    "The events differ from tests/events/schema.json. If that is not meant, undo it: a renamed, moved or retyped "
    "field makes every recorded trace unreadable. If it is meant, raise SCHEMA_VERSION in eventlm/events/markers.py "
    "(older traces are then refused), run `python -m tests.events.test_schema`, record the golden traces anew, and "
    "commit all of it together."
)


def _structs_in(hint: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for argument in get_args(hint):
        yield from _structs_in(argument)


def _fields(struct: type[msgspec.Struct]) -> list[str]:
    hints = get_type_hints(struct, include_extras=True)
    listed = []
    for field in msgspec.structs.fields(struct):
        hint = hints[field.name]
        entry = f"{field.encode_name}: {hint if get_args(hint) else hint.__name__}"
        if field.default_factory is not msgspec.NODEFAULT:
            entry += f" = {field.default_factory()!r}"
        elif field.default is not msgspec.NODEFAULT:
            entry += f" = {field.default!r}"
        listed.append(entry)
    return listed


def schema() -> dict[str, Any]:
    """Every event by its tag, and every struct that an event holds, with fields in the order of the line."""
    nested: dict[str, Any] = {}
    for event in EVENTS:
        for hint in get_type_hints(event).values():
            for struct in _structs_in(hint):
                nested[struct.__name__] = _fields(struct)
    return {
        "format": FORMAT_VERSION,
        "schema": SCHEMA_VERSION,
        "events": {str(event.__struct_config__.tag): _fields(event) for event in EVENTS},
        "structs": dict(sorted(nested.items())),
    }


def _as_text(found: dict[str, Any]) -> str:
    return msgspec.json.format(msgspec.json.encode(found), indent=1).decode() + "\n"


def test_the_schema_is_the_frozen_one() -> None:
    frozen = msgspec.json.decode(SNAPSHOT.read_bytes())
    found = msgspec.json.decode(_as_text(schema()))
    for part in ("events", "structs"):
        for name in sorted(frozen[part].keys() | found[part].keys()):
            assert found[part].get(name) == frozen[part].get(name), f"{part} {name}: {WHAT_TO_DO}"
    assert SNAPSHOT.read_text() == _as_text(schema()), WHAT_TO_DO


def test_a_change_of_a_field_is_seen() -> None:
    before = _fields(Fact)

    class Changed(Event, frozen=True, kw_only=True):
        p: bool = False

    class Moved(Event, frozen=True, kw_only=True):
        q: int = 0
        p: int = 0

    assert _fields(Changed) != before
    assert _fields(Moved) != before
    assert before == ["s: int = 0", "ts: int = 0", "c: int = 0", "p: int = 0"]


def test_tags_are_unique() -> None:
    tags = [event.__struct_config__.tag for event in EVENTS]
    assert len(tags) == len(set(tags))
    assert all(isinstance(tag, str) and tag.replace("_", "").isalpha() and tag.islower() for tag in tags)


def test_every_event_is_frozen_and_strict() -> None:
    for event in EVENTS:
        config = event.__struct_config__
        assert config.frozen, event
        assert config.forbid_unknown_fields, event
        assert config.tag_field == "t", event
        assert config.omit_defaults == (event is not Header), event


if __name__ == "__main__":
    SNAPSHOT.write_text(_as_text(schema()))
