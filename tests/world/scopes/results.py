"""The results of searches, as shown in `RESULTS.md`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from tests.world.scopes.search import Result

PAGE = Path(__file__).parents[1] / "RESULTS.md"
_FILE = "SCOPES.json"
_BEGIN, _END = "<!-- scopes: written by tests.world.scopes -->", "<!-- end of scopes -->"


class Searched(Struct, frozen=True):
    """A scope that was searched completely at a commit, without a violation. seconds: CPU time on one core."""

    scope: str
    commit: str
    states: int
    transitions: int
    depth: int
    seconds: int


def add_search(scope: str, commit: str, result: Result, page: Path = PAGE) -> None:
    """Add a search without a violation to the page, and to the JSON file from which the page's table is made. It
    replaces an earlier search of the scope. Raises ValueError if the search is not complete.
    """
    if not result.is_whole:
        raise ValueError(f"the scope {scope} was not searched whole")
    searched = {each.scope: each for each in read_searches(page)}
    seconds = round(result.seconds)
    searched[scope] = Searched(scope, commit, result.num_states, result.num_transitions, result.depth, seconds)
    lines = b",\n".join(map(msgspec.json.encode, searched.values()))
    page.with_name(_FILE).write_bytes(b"[\n%b\n]\n" % lines)
    text = page.read_text()
    before, after = text.split(_BEGIN)[0], text.split(_END)[1]
    table = "\n".join(rows(searched.values()))
    page.write_text(f"{before}{_BEGIN}\n\n{table}\n\n{_END}{after}")


def read_searches(page: Path = PAGE) -> list[Searched]:
    """All searches that were added to the page, in the order in which their scopes were first added."""
    path = page.with_name(_FILE)
    return msgspec.json.decode(path.read_bytes(), type=list[Searched]) if path.exists() else []


def rows(searches: Iterable[Searched]) -> list[str]:
    """The lines of the page's table."""
    searches = list(searches)
    total = Searched(
        f"all {len(searches)}",
        "",
        sum(each.states for each in searches),
        sum(each.transitions for each in searches),
        max((each.depth for each in searches), default=0),
        sum(each.seconds for each in searches),
    )
    return [
        "| scope | states | transitions | depth | seconds | commit |",
        "|---|---:|---:|---:|---:|---|",
        *map(_row, (*searches, total)),
    ]


def _row(of: Searched) -> str:
    return f"| {of.scope} | {of.states:,} | {of.transitions:,} | {of.depth} | {of.seconds:,} | {of.commit} |"
