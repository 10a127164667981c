"""Whole floats become integers where a field has integers and no floats, and nowhere else."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from msgspec import Meta, Struct

from eventlm.text.whole_numbers import with_integers


class Inner(Struct):
    """A nested object."""

    count: int = 0


class Outer(Struct):
    """One field of each kind that is treated otherwise."""

    n: int = 1
    bounded: Annotated[int, Meta(ge=0)] | None = None
    temperature: float = 1.0
    either: int | float = 0
    texts: list[str] = []
    ids: list[int] = []
    bias: dict[str, int] = {}
    inner: Inner | None = None


@pytest.mark.parametrize(
    ("raw", "read"),
    [
        ({"n": 2.0}, {"n": 2}),
        ({"bounded": 3.0}, {"bounded": 3}),
        ({"ids": [1.0, 2, "x"]}, {"ids": [1, 2, "x"]}),
        ({"bias": {"7": 5.0}}, {"bias": {"7": 5}}),
        ({"inner": {"count": 4.0}}, {"inner": {"count": 4}}),
    ],
)
def test_whole_floats_become_integers(raw: dict[str, Any], read: dict[str, Any]) -> None:
    found = with_integers(raw, Outer)
    assert found == read
    assert repr(found) == repr(read)


@pytest.mark.parametrize(
    "raw",
    [{"n": 2.5}, {"n": True}, {"n": "2.0"}, {"temperature": 2.0}, {"either": 2.0}, {"texts": [1.0]}, {"unknown": 1.0}],
)
def test_all_else_stays_as_it_is(raw: dict[str, Any]) -> None:
    assert repr(with_integers(raw, Outer)) == repr(raw)
