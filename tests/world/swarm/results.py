"""What many seeds have shown together, as listed in `RESULTS.md`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from tests.world.swarm.cases import Outcome

PAGE = Path(__file__).parents[1] / "RESULTS.md"
_BEGIN, _END = "<!-- totals: written by tests.world.simulate -->", "<!-- end of totals -->"


class Totals:
    """Sums over seeds, by group and name. Failed seeds count only in the numbers of seeds and failures."""

    def __init__(self) -> None:
        self.groups: dict[str, Counter[str]] = {
            group: Counter() for group in ("seeds", "faults set", "faults", "hits", "checks", "statuses", "failures")
        }

    def add(self, outcome: Outcome) -> None:
        """Add one seed."""
        self.groups["seeds"]["seeds"] += 1
        if outcome.failure is not None:
            self.groups["failures"][outcome.failure.name] += 1
        if (ran := outcome.ran) is not None:
            self.join(
                {
                    "seeds": {
                        "simulated seconds": round(ran.simulated_seconds),
                        "CPU seconds": round(ran.cpu_seconds),
                        "requests": ran.num_requests,
                        "events": ran.num_events,
                    },
                    "faults set": ran.faults_set,
                    "faults": ran.faults,
                    "hits": ran.hits,
                    "checks": ran.checks,
                    "statuses": ran.statuses,
                }
            )

    def join(self, groups: Mapping[str, Mapping[str, int]]) -> None:
        """Add the sums of other seeds."""
        for group, counts in groups.items():
            self.groups[group].update(counts)

    def rows(self) -> Iterator[tuple[str, str]]:
        """(what, how often) for all groups except the kinds of faults."""
        seeds = self.groups["seeds"]
        hours = seeds["simulated seconds"] / 3600
        yield "seeds", f"{seeds['seeds']:,}"
        yield "simulated hours", f"{hours:,.1f}"
        yield "simulated hours a second of a core", f"{hours / max(seeds['CPU seconds'], 1):.2f}"
        yield "requests", f"{seeds['requests']:,}"
        yield "events in logs", f"{seeds['events']:,}"
        yield "faults that were set", f"{self.groups['faults set'].total():,}"
        yield "faults that struck", f"{self.groups['faults'].total():,}"
        for group, word in (("hits", "hit"), ("checks", "check"), ("statuses", "status"), ("failures", "failure")):
            if group in ("checks", "failures"):
                yield group, f"{self.groups[group].total():,}"
            for name, count in sorted(self.groups[group].items()):
                yield f"{word}: {name}", f"{count:,}"

    def fault_rows(self) -> Iterator[tuple[str, str, str]]:
        """(kind, how many were set, how many of those struck)."""
        for kind, count in sorted(self.groups["faults set"].items()):
            yield kind, f"{count:,}", f"{self.groups['faults'][kind]:,}"


class Batch(Struct, frozen=True):
    """Seeds that were run together at one commit."""

    commit: str
    seeds: str
    pace: str
    groups: Mapping[str, Mapping[str, int]]


def add_batch(batch: Batch, page: Path = PAGE) -> None:
    """Add a batch to the page's totals, and to the JSON file beside it from which they are summed up."""
    path = page.with_suffix(".json")
    batches = [*read_batches(page), batch]
    lines = b",\n".join(map(msgspec.json.encode, batches))
    path.write_bytes(b"[\n%b\n]\n" % lines)
    totals = Totals()
    for each in batches:
        totals.join(each.groups)
    text = page.read_text()
    before, after = text.split(_BEGIN)[0], text.split(_END)[1]
    page.write_text(f"{before}{_BEGIN}\n\n{shown(totals)}\n{_END}{after}")


def shown(totals: Totals) -> str:
    """The totals as the page shows them."""
    rows = "".join(f"| {what} | {count} |\n" for what, count in totals.rows())
    faults = "".join(f"| {kind} | {num_set} | {num_struck} |\n" for kind, num_set, num_struck in totals.fault_rows())
    return f"| what | how many |\n|---|---:|\n{rows}\n| fault | set | struck |\n|---|---:|---:|\n{faults}"


def read_batches(page: Path = PAGE) -> list[Batch]:
    """All batches that were added to the page."""
    path = page.with_suffix(".json")
    return msgspec.json.decode(path.read_bytes(), type=list[Batch]) if path.exists() else []
