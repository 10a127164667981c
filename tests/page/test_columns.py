"""Columns come out of the browser as they went in."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from playwright.sync_api import expect

from eventlm.page.columns import LARGEST_VALUE, pack_columns
from tests.page.opened_file import OpenedFile

OpenFile = Callable[..., OpenedFile]


def unpack(open_file: OpenFile, packed: dict[str, Any]) -> dict[str, Any]:
    page = open_file("unpacking.js", packed)
    expect(page.page.locator("pre")).not_to_be_empty()
    unpacked: dict[str, Any] = json.loads(page.page.locator("pre").inner_text())
    return unpacked


def test_they_come_out_as_they_went_in(open_file: OpenFile) -> None:
    random = numpy.random.default_rng(4)
    rows = 5_000
    edges = [0, 1, -1, 63, 64, -64, -65, 127, 128, 2**31 - 1, 2**31, -(2**31), 2**33, LARGEST_VALUE, -LARGEST_VALUE]
    start = numpy.cumsum(random.integers(0, 10**9, rows))
    columns = {
        "edges": numpy.resize(edges, rows),
        "start": start,
        "end": start + random.integers(0, 10**6, rows),
        "small": random.integers(-5, 5, rows),
        "flag": start % 2 == 0,
        "unsigned": numpy.arange(rows, dtype=numpy.uint32),
        "coarse": start,
    }
    packed = pack_columns(columns, relative_to={"end": "start"}, units={"coarse": 1000})
    forms = {each["name"]: each["form"] for each in packed["columns"]}
    assert (forms["start"], forms["end"], forms["small"], forms["unsigned"]) == ("above", "other", "plain", "above")
    unpacked = unpack(open_file, packed)
    assert unpacked.pop("rows") == rows
    kinds = {name: column["type"] for name, column in unpacked.items()}
    assert kinds == dict.fromkeys(columns, "Int32Array") | dict.fromkeys(
        ("edges", "start", "end", "coarse"), "Float64Array"
    )
    columns["coarse"] = start // 1000 * 1000
    for name, values in columns.items():
        assert unpacked[name]["values"] == numpy.asarray(values).astype(int).tolist(), name


def test_a_relative_column_may_be_in_another_unit_than_one(open_file: OpenFile) -> None:
    start = numpy.arange(50) * 123_456_789
    packed = pack_columns(
        {"start": start, "end": start + 5_000}, relative_to={"end": "start"}, units={"start": 1000, "end": 1000}
    )
    assert packed["columns"][1]["form"] == "other"
    unpacked = unpack(open_file, packed)
    assert unpacked["end"]["values"] == ((start + 5_000) // 1000 * 1000).tolist()


def test_no_rows(open_file: OpenFile) -> None:
    unpacked = unpack(open_file, pack_columns({"none": []}))
    assert unpacked == {"rows": 0, "none": {"type": "Int32Array", "values": []}}


def test_a_length_that_is_not_right_is_said(open_file: OpenFile) -> None:
    packed = pack_columns({"a": [1, 2, 300]})
    packed["rows"] = 2
    page = open_file("unpacking.js", packed)
    expect(page.page.locator("pre")).to_have_text("Error: a packed column has not the length that it says")


def test_differences_are_short() -> None:
    """What rises evenly, or hardly changes, takes next to nothing."""
    packed = pack_columns({"even": numpy.arange(100_000) * 10**7, "replica": numpy.zeros(100_000, int)})
    assert len(json.dumps(packed)) < 1_500


@pytest.mark.parametrize(
    ("columns", "relative_to", "says"),
    [
        ({"a": [0.5]}, {}, "column a: needs integers in one dimension, not float64 in 1"),
        ({"a": [[1]]}, {}, "column a: needs integers in one dimension, not int64 in 2"),
        (
            {"a": [LARGEST_VALUE + 1]},
            {},
            f"column a: a page holds values up to {LARGEST_VALUE}; count from a later start",
        ),
        (
            {"a": [-LARGEST_VALUE - 1]},
            {},
            f"column a: a page holds values up to {LARGEST_VALUE}; count from a later start",
        ),
        ({"a": [1], "b": [1, 2]}, {}, "column b: 2 rows where the others have 1"),
        ({"a": [1], "b": [1]}, {"a": "b"}, "column a: b must stand before it, in the same unit"),
    ],
)
def test_what_a_page_cannot_hold_is_refused(columns: dict[str, Any], relative_to: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        pack_columns(columns, relative_to=relative_to)
    assert str(caught.value) == says
