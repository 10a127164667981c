"""Searches small worlds of the core completely:

python -m tests.world.scopes                       the scopes that `make test` searches
python -m tests.world.scopes --soak                all scopes
python -m tests.world.scopes equal late            the scopes with these names
python -m tests.world.scopes equal --path 0,3,1    what a path of moves leads to, fact by fact
"""

from __future__ import annotations

import argparse
import resource
import sys

from msgspec import json

from eventlm.errors import InvariantError
from eventlm.events import Decision
from tests.layout import ROOT
from tests.world.commit import Commit
from tests.world.scopes.results import PAGE, add_search
from tests.world.scopes.scopes import SMALL, SOAK
from tests.world.scopes.search import Result, Search, Violation, replay
from tests.world.scopes.world import Move, Scope


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0: nothing was found; 1: something was found; 2: invalid arguments."""
    scopes = {scope.name: scope for scope in (*SMALL, *SOAK)}
    parser = argparse.ArgumentParser(
        prog="python -m tests.world.scopes",
        description="Search small worlds of the core whole: every order of the facts that can come next.",
        epilog="scopes: " + " ".join(scopes),
    )
    parser.add_argument("names", nargs="*", metavar="SCOPE", help="scopes to search; by default those of make test")
    parser.add_argument("--soak", action="store_true", help="search the large ones too; takes hours")
    parser.add_argument("--most-states", type=int, default=0, metavar="N", help="stop each search after N states")
    parser.add_argument(
        "--add-to-results", action="store_true", help=f"add each to {PAGE.relative_to(ROOT)} as it ends"
    )
    parser.add_argument("--path", metavar="N,N,...", help="do not search: replay these moves and print each fact")
    args = parser.parse_args(arguments)
    unknown = [name for name in args.names if name not in scopes]
    if unknown:
        print(f"there is no scope {unknown[0]!r}: choose from {' '.join(scopes)}", file=sys.stderr)
        return 2
    chosen = [scopes[name] for name in args.names] or [*SMALL, *(SOAK if args.soak else ())]
    if args.path is not None:
        return _replay(chosen[0], args.path)
    commit = Commit() if args.add_to_results else None
    if commit is not None and commit.why_not_added:
        print(commit.why_not_added, file=sys.stderr)
        return 2
    return _search_all(chosen, args.most_states, commit)


def _search_all(scopes: list[Scope], most_states: int, commit: Commit | None) -> int:
    """Search all scopes. commit: the commit for which to add them to the results; None: do not add them."""
    total, found = Result(), 0
    for scope in scopes:
        try:
            result = Search(scope, most_states=most_states, report=_report).run()
        except Violation as violation:
            print(violation, flush=True)
            found += 1
            continue
        print(f"{scope.name}: {result}", flush=True)
        total.add(result)
        if commit is not None and result.is_whole:
            add_search(scope.name, commit.name, result)
    print(", ".join(f"{kind} {count:,}" for kind, count in sorted(total.seen.items())))
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{len(scopes)} scopes: {total}, {peak_mib:,} MiB at most, {found} violations")
    return int(found > 0)


def _report(result: Result) -> None:
    print(f"  {result}", file=sys.stderr, flush=True)


def _replay(scope: Scope, path: str) -> int:
    try:
        world = replay(scope, [int(number) for number in path.split(",") if number], _print_move)
    except InvariantError as error:
        print(error)
        return 1
    except (IndexError, ValueError):
        print(f"there is no path {path!r} in the scope {scope.name}: each number is that of a move", file=sys.stderr)
        return 2
    for request in world.core.state.requests.values():
        for sequence in request.sequences:
            print(sequence)
    return 0


def _print_move(move: Move, decisions: list[Decision]) -> None:
    print(json.encode(move.fact).decode())
    for decision in decisions:
        print(f"    {json.encode(decision).decode()}")


if __name__ == "__main__":
    sys.exit(main())
