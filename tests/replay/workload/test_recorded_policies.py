"""Which policies a run had: after swaps, in the middle of a log, in words; and what a what-if says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eventlm.bus.log_writer import LogWriter
from eventlm.events import PolicySwapped
from eventlm.replay.what_if.engine import Alternative
from eventlm.replay.what_if.report import render, render_json
from eventlm.replay.what_if.what_if import WhatIfResult, what_if
from eventlm.replay.workload.recorded_policies import PolicySpan, describe, simulation_note, what_if_note
from eventlm.replay.workload.recorded_run import read_run
from eventlm.replay.workload.source import load_workload
from eventlm.system.system import real_system
from tests.replay.traces import CALM, small_machine
from tests.replay.what_if_runs import MILLISECOND, events_of, policy
from tests.simulation import Simulation

SWAPS = {"lrs": 40 * MILLISECOND, "edf": 60 * MILLISECOND}


@pytest.fixture(scope="module")
def swapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of edf, then lrs, lrs again, and edf: in segments, the later of which begin behind swaps."""
    with LogWriter(real_system(), tmp_path_factory.mktemp("runs"), "run", segment_bytes=8192) as writer:
        machine = small_machine({"type": "edf"})
        simulation = Simulation(1, num_requests=40, machine=machine, chaos=CALM, writer=writer, check_every=0)
        for name, at_ns in [("lrs", SWAPS["lrs"]), ("lrs", SWAPS["lrs"] + MILLISECOND), ("edf", SWAPS["edf"])]:
            simulation.at(at_ns, lambda name=name: simulation.engine_core.put_fact(PolicySwapped(name=name)))  # type: ignore[misc]
        simulation.run()
    return Path(writer.run_folder)


@pytest.fixture(scope="module")
def result(swapped: Path, tmp_path_factory: pytest.TempPathFactory) -> WhatIfResult:
    return what_if(swapped, [policy("fcfs"), Alternative(num_replicas=2)], output=tmp_path_factory.mktemp("simulated"))


def test_the_policies_of_a_run_with_the_times_of_their_swaps(swapped: Path) -> None:
    [found] = read_run(swapped).policies
    assert [each.name for each in found] == ["edf", "lrs", "edf"]
    assert [each.from_ns for each in found[1:]] == list(SWAPS.values())
    assert describe(found) == "edf, lrs from 0.040 s on, edf from 0.060 s on"


def test_a_later_segment_begins_with_the_policy_that_ran_there(swapped: Path) -> None:
    segments = [read_run(path) for path in sorted(swapped.glob("trace-*.jsonl"))]
    whole = segments[0].policies[0] + [each for later in segments[1:] for each in later.policies[0][1:]]
    assert [each.name for each in whole] == ["edf", "lrs", "edf"]
    between = [later for later in segments if SWAPS["lrs"] < later.header.ts < SWAPS["edf"]]
    assert between
    assert all(later.policies[0][0].name == "lrs" for later in between)


def test_the_report_says_which_policies_ran_and_what_becomes_of_the_swaps(result: WhatIfResult) -> None:
    text = " ".join(render(result).split())
    assert text.partition("recorded policy ")[2].startswith("edf:multiplier=1.5,")
    assert "edf, lrs from 0.040 s on, edf from 0.060 s on" in text
    assert "Note on fcfs: the policy was swapped at run time" in text
    assert "the baseline do that; here its own policy runs from the start to the end." in text
    assert "Note on 2 replicas: the policy was swapped at run time" in text
    assert "the baseline do that, and so does this one." in text
    found = json.loads(render_json(result))
    assert [each["name"] for each in found["recorded"]["policies"]] == ["edf", "lrs", "edf"]
    assert [each["from_ns"] for each in found["recorded"]["policies"][1:]] == list(SWAPS.values())


def test_the_alternatives_handle_the_swaps_as_reported(result: WhatIfResult) -> None:
    swaps = [
        [event.name for event in events_of(each.run_folder) if isinstance(event, PolicySwapped)]
        for each in result.alternatives
    ]
    assert swaps == [[], ["lrs", "lrs", "edf"]]


def test_a_simulation_of_the_run_s_work_says_that_it_leaves_them_out(swapped: Path) -> None:
    [note] = load_workload(swapped).notes
    assert "edf, lrs from 0.040 s on" in note
    assert "not repeated here" in note


def test_a_run_of_one_policy_is_not_reported() -> None:
    spans = [PolicySpan(name="fcfs", spec="fcfs", from_ns=0)]
    assert describe(spans) == "fcfs"
    assert (
        what_if_note(spans, is_replaced=True) == what_if_note(spans, is_replaced=False) == simulation_note(spans) == ""
    )


def test_many_swaps_are_counted() -> None:
    spans = [PolicySpan(name=f"p{number}", spec="", from_ns=number * 1_000_000_000) for number in range(8)]
    assert describe(spans).endswith("p4 from 4.000 s on, and 3 more swaps")
