"""From msgspec's messages to errors that name the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import Struct

from eventlm.field_errors import field_error, split_message


class Inner(Struct):
    """A required field."""

    name: str


class Outer(Struct):
    """Fields of several kinds."""

    items: list[Inner] = []
    by_id: dict[int, float] = {}


@pytest.mark.parametrize(
    ("value", "param", "code"),
    [
        ({"items": [{"name": "a"}, {}]}, "items[1].name", "missing_required_parameter"),
        ({"items": [{"name": 3}]}, "items[0].name", "invalid_type"),
        ({"items": 3}, "items", "invalid_type"),
        ({"by_id": {"a": 1.0}}, "by_id", "invalid_type"),
        ({"by_id": {3: "a"}}, "by_id", "invalid_type"),
        (3, None, "invalid_type"),
    ],
)
def test_the_field_is_named(value: Any, param: str | None, code: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(value, Outer)
    error = field_error(*split_message(str(caught.value)))
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("Expected `str` of length <= 5", "Invalid value for 'x': expected at most 5 characters."),
        ("Expected `array` of length <= 16", "Invalid value for 'x': expected at most 16 items."),
        ("Expected `object` of length <= 16", "Invalid value for 'x': expected at most 16 pairs."),
        ("Expected `str` of length >= 1", "Invalid value for 'x': it must not be empty."),
    ],
)
def test_lengths_in_plain_words(problem: str, message: str) -> None:
    assert str(field_error(problem, "x")) == message
