"""Columns of text."""

from __future__ import annotations

from eventlm.table import table


def test_columns_are_as_wide_as_they_must_be() -> None:
    assert list(table(["name", "count"], [["a", "1,000"], ["longer", "2"]])) == [
        "name    count",
        "a       1,000",
        "longer      2",
    ]


def test_more_columns_to_the_left_and_no_blanks_at_the_end() -> None:
    assert list(table(["a", "b"], [["1", "long"], ["2", "x"]], num_left=2)) == ["a  b", "1  long", "2  x"]
