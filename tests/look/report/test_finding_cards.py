"""Findings as the page shows them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec import structs

from eventlm.look.findings.find import find_all
from eventlm.look.report.finding_cards import cards
from eventlm.replay.index.index import Index
from eventlm.replay.index.open import open_index
from tests.look.planted import record_sets


def test_a_card_says_where_to_look_and_what_to_type(planted_index: Callable[[str], Index]) -> None:
    index = planted_index("starving_key")
    first, second = cards(index, find_all(index), "my runs/one", 0)
    request = first["requests"][0]["name"]
    assert index.find_row(int(request)) == first["requests"][0]["row"]
    s, row = find_all(index)[0].s, first["requests"][0]["row"]
    assert first["commands"] == [
        f"eventlm debug 'my runs/one' --trust-local-plugins -c 'goto {s}' -c 'why {request}'",
        f"eventlm explain 'my runs/one' --trust-local-plugins {request}",
    ]
    assert first["debuggerCommands"] == [f"goto {s}", f"why {request}"]
    # There it waits.
    assert index.requests["arrived_ns"][row] < find_all(index)[0].ts < index.requests["launched_ns"][row]
    assert (first["tone"], first["verdict"]) == ("bad", "serious")
    # Saturation follows from it.
    assert (second["tone"], second["culpritLabel"], first["culpritLabel"]) == ("warning", "Limit", "Culprit")
    labels = [figure["label"] for figure in second["figures"]]
    assert labels == ["waiting time share", "wait share", "p90 wait", "most waiting"]
    assert second["figures"][0]["value"].endswith("%")
    assert second["figures"][2]["value"].endswith("s")


def test_a_cause_in_one_replicaset_excuses_no_other(tmp_path: Path) -> None:
    router = {"type": "tests.look.planted:OneSidedRouter"}
    index = open_index(record_sets(tmp_path, replicas=2, max_num_seqs=2, router=router), trust_local_plugins=True)
    (cause, consequence) = found = find_all(index)
    assert (cause.kind, consequence.kind) == ("imbalance", "saturation")
    first, second = cards(index, found, "x", 0)
    assert (first["culpritLabel"], second["culpritLabel"], second["tone"]) == ("Culprit", "Limit", "warning")
    assert all("--trust-local-plugins" in each["commands"][0] for each in (first, second))
    of_other = structs.replace(cause, replicaset=0)
    assert cards(index, [of_other, consequence], "x", 0)[1]["tone"] == "bad"


def test_times_are_those_of_the_page(planted_index: Callable[[str], Index]) -> None:
    index = planted_index("starving_key")
    found = find_all(index)
    (first, _) = cards(index, found, "x", found[0].ts - 5)
    assert first["at"] == 5
    (first, _) = cards(index, found, "x", found[0].ts + 5)
    assert first["at"] is None
