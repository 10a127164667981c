"""Columns of text."""

from __future__ import annotations

import sys

import pytest

from eventlm.table import table


def test_columns_are_as_wide_as_they_must_be() -> None:
    assert list(table(["name", "count"], [["a", "1,000"], ["longer", "2"]])) == [
        "name    count",
        "a       1,000",
        "longer      2",
    ]


def test_more_columns_to_the_left_and_no_blanks_at_the_end() -> None:
    assert list(table(["a", "b"], [["1", "long"], ["2", "x"]], left=range(2))) == ["a  b", "1  long", "2  x"]


ROWS = [["a name of several words, ms", "1,234.5", "9"], ["[bold]x[/] :smile:", "2", "10,000,000"]]


def test_without_a_terminal_its_width_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    lines = list(table(["name", "p50", "count"], ROWS))
    assert lines == [
        "name                             p50       count",
        "a name of several words, ms  1,234.5           9",
        "[bold]x[/] :smile:                 2  10,000,000",
    ]
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("columns", [40, 20])
def test_on_a_narrow_terminal_text_is_folded_and_numbers_are_whole(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = list(table(["name", "p50", "count"], ROWS))
    assert lines[0].endswith("    p50       count")
    assert {len(line) for line in lines if line.endswith(("9", "0"))} == {len(lines[0])}
    assert len(lines[0]) <= max(columns, 16 + 2 + 7 + 2 + 10)
    text = " ".join(line[: lines[0].index("p50") - 4].strip() for line in lines[1:])
    assert " ".join(text.split()) == "a name of several words, ms [bold]x[/] :smile:"
    assert sum("1,234.5" in line for line in lines) == sum("10,000,000" in line for line in lines) == 1
    assert "\x1b" not in "".join(lines)


def test_a_table_without_a_row() -> None:
    assert list(table(["name", "count"], [])) == ["name  count"]
