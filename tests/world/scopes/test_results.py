"""The searches that the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.world.scopes.results import PAGE, add_search, read_searches, rows
from tests.world.scopes.scopes import SMALL, SOAK
from tests.world.scopes.search import Result


def test_a_later_search_of_a_scope_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    page = tmp_path / "RESULTS.md"
    page.write_text(PAGE.read_text())
    add_search("equal", "abc", Result(num_states=1000, depth=3, seconds=2), page)
    add_search("late", "abc", Result(num_states=500, depth=4, seconds=1), page)
    add_search("equal", "abd", Result(num_states=2000, depth=5, seconds=2), page)
    assert [(each.scope, each.states) for each in read_searches(page)] == [("equal", 2000), ("late", 500)]
    assert "| equal | 2,000 | 0 | 5 | 2 | abd |\n| late | 500 |" in page.read_text()
    assert "| all 2 | 2,500 | 0 | 5 | 3 |  |" in page.read_text()
    assert page.read_text().split("## Bugs")[1] == PAGE.read_text().split("## Bugs")[1]


def test_a_search_that_is_not_whole_is_not_added(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="equal"):
        add_search("equal", "abc", Result(is_whole=False), tmp_path / "RESULTS.md")


def test_the_page_shows_the_searches_of_scopes_that_there_are() -> None:
    searches = read_searches()
    assert {each.scope for each in searches} <= {scope.name for scope in (*SMALL, *SOAK)}
    if searches:
        assert "\n".join(rows(searches)) in PAGE.read_text()
