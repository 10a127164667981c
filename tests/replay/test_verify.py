"""Verification: a run verifies, a changed run is reported where it changes, and whoever meddles is found out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from eventlm.bus.log_writer import LogWriter
from eventlm.core import replicaset
from eventlm.core.block_pool import BlockPool
from eventlm.errors import TornTraceError, TraceCorruptError, TraceVersionError, UsageError
from eventlm.events import PolicySwapped
from eventlm.events.codec import DECISION_TAGS, chain, close_line, encode_body
from eventlm.policies.fcfs import Fcfs
from eventlm.replay.divergence import Divergence
from eventlm.replay.rebuild import Changes
from eventlm.replay.verify import verify
from tests.bus.traces import header
from tests.replay.traces import (
    CALM,
    Objects,
    divergence_of,
    places,
    read_objects,
    record,
    small_machine,
    tampered,
    write_objects,
)
from tests.simulation import Simulation
from tests.workload import MILLISECOND, Chaos

CROWDED = {"max_num_seqs": 2}

SEQ = re.compile(r'"s":(\d+)')

CANARIES = """
import os
from eventlm.core.plugin import Policy

calls = []

class Dice(Policy, frozen=True, kw_only=True):
    def keys(self, sequences, now_ns):
        return [os.urandom(1)[0] for s in sequences]

class Address(Policy, frozen=True, kw_only=True):
    def keys(self, sequences, now_ns):
        return [hash((id(s), now_ns)) for s in sequences]

class Moody(Policy, frozen=True, kw_only=True):
    def keys(self, sequences, now_ns):
        calls.append(now_ns)
        return [s.request if len(calls) < 50 else -s.request for s in sequences]

class Steady(Policy, frozen=True, kw_only=True):
    def keys(self, sequences, now_ns):
        return [-s.request for s in sequences]
"""


class Recording(NamedTuple):
    """A run and its events."""

    path: Path
    objects: Objects


@pytest.fixture(scope="module")
def fcfs_run(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    path = record(tmp_path_factory.mktemp("fcfs"), small_machine({"type": "fcfs"}))
    return Recording(path, read_objects(path))


@pytest.fixture(scope="module")
def edf_run(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    machine = small_machine({"type": "edf", "min_deadline_ms": 1}, **CROWDED)
    path = record(tmp_path_factory.mktemp("edf"), machine)
    return Recording(path, read_objects(path))


def test_a_recorded_run_verifies(fcfs_run: Recording) -> None:
    result = verify(fcfs_run.path, check_invariants=True)
    assert result.divergence is None
    assert (result.exit_code, result.clean_end, result.warnings) == (0, True, [])
    assert result.num_events == len(fcfs_run.objects)
    assert result.num_decisions == sum(item["t"] in DECISION_TAGS for item in fcfs_run.objects) > 100
    assert result.num_checkpoints == len(places(fcfs_run.objects, "checkpoint")) > 1


def test_rewriting_a_trace_changes_nothing(fcfs_run: Recording, tmp_path: Path) -> None:
    # What the tests below do to a trace, they do on purpose.
    assert tampered(fcfs_run.path, tmp_path / "t", lambda objects: None).read_bytes() == fcfs_run.path.read_bytes()


def test_progress_is_told_to_the_last_byte(fcfs_run: Recording) -> None:
    told: list[tuple[int, int]] = []
    verify(fcfs_run.path, on_progress=lambda done, total: told.append((done, total)))
    size = fcfs_run.path.stat().st_size
    assert told[-1] == (size, size)


def _assert_is_first(run: Recording, found: Divergence, changes: Changes, folder: Path) -> None:
    """The trace verifies under the change up to the divergence, and not a decision further."""
    before = write_objects(folder / "before", run.objects[: found.s])
    assert verify(before, changes=changes).divergence is None
    including = write_objects(folder / "including", run.objects[: found.s + 1])
    assert divergence_of(verify(including, changes=changes)).s == found.s


def _assert_tells_the_story(run: Recording, found: Divergence) -> None:
    assert found.recorded == run.objects[found.s]
    assert found.line == found.s + 1
    assert found.replayed is not None
    assert found.replayed != found.recorded
    assert found.fields
    for sentence in found.fields:
        name = sentence.partition(":")[0].partition("[")[0]
        assert "recorded" in sentence
        assert "replayed" in sentence
        assert found.recorded.get(name) != found.replayed.get(name)
    # From the decision, by causes, to what arrived.
    links = [run.objects[int(match[1])] for match in map(SEQ.search, found.chain) if match]
    assert links[0] == found.recorded
    assert any(link["t"] == "arrive" for link in links)
    for before, after in pairwise(links):
        assert before.get("c", 0) == after["s"] or after["t"] == "arrive"
    assert any("running" in line for line in found.state)
    assert found.cause
    assert found.remedy


def test_another_token_budget_is_config_drift_at_the_first_launch_that_exceeds_it(
    fcfs_run: Recording, tmp_path: Path
) -> None:
    changes = Changes(settings={"max_num_batched_tokens": 8})
    found = divergence_of(verify(fcfs_run.path, changes=changes))
    assert (found.code, found.exit_code) == ("config_drift", 10)
    launches = places(fcfs_run.objects, "launch")
    assert found.s == next(place for place in launches if fcfs_run.objects[place]["num_tokens"] > 8)
    assert found.recorded is not None
    assert found.replayed is not None
    assert found.recorded["num_tokens"] > 8 >= found.replayed["num_tokens"]
    text = f"num_tokens: recorded {found.recorded['num_tokens']}, replayed {found.replayed['num_tokens']}"
    assert text in found.fields
    _assert_tells_the_story(fcfs_run, found)
    _assert_is_first(fcfs_run, found, changes, tmp_path)


def test_another_multiplier_of_edf_is_policy_drift_at_the_first_decision_it_alters(
    edf_run: Recording, tmp_path: Path
) -> None:
    changes = Changes(policy={"type": "edf", "multiplier": 20, "min_deadline_ms": 1})
    found = divergence_of(verify(edf_run.path, changes=changes))
    assert (found.code, found.exit_code) == ("policy_drift", 10)
    _assert_tells_the_story(edf_run, found)
    _assert_is_first(edf_run, found, changes, tmp_path)


@pytest.mark.parametrize("changes", [
    {"policy": {"type": "lrs"}},
    {"batcher": {"type": "fixed", "max_chunk_tokens": 2}},
    {"settings": {"max_num_seqs": 1}},
])  # fmt: skip
def test_other_changes_are_found_too(edf_run: Recording, changes: dict[str, Any]) -> None:
    found = divergence_of(verify(edf_run.path, changes=Changes(**changes)))
    assert found.code == ("config_drift" if "settings" in changes else "policy_drift")


def test_a_change_that_alters_nothing_verifies(edf_run: Recording) -> None:
    changes = Changes(policy={"type": "edf", "min_deadline_ms": 1, "multiplier": 1.5}, router={"type": "least_loaded"})
    assert verify(edf_run.path, changes=changes).exit_code == 0


class FcfsByAnotherName(Fcfs, frozen=True, kw_only=True):
    """Decides as FCFS does."""


def test_under_a_change_only_decisions_count(fcfs_run: Recording) -> None:
    # The policy in force is part of the state, so every checkpoint of this trace differs; no decision does.
    changes = Changes(policy={"type": f"{__name__}:FcfsByAnotherName"})
    plain, changed = verify(fcfs_run.path), verify(fcfs_run.path, changes=changes)
    assert plain.num_checkpoints > 0
    assert (changed.exit_code, changed.num_decisions, changed.num_checkpoints) == (0, plain.num_decisions, 0)
    assert changed.change == f"policy {__name__}:FcfsByAnotherName"


def test_a_run_that_swaps_its_first_policy_in_again_gets_what_took_its_place(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, "run")
    simulation = Simulation(1, chaos=CALM, machine=small_machine({"type": "fcfs"}), writer=writer)
    simulation.at(100 * MILLISECOND, lambda: simulation.driver.put_fact(PolicySwapped(name="fcfs")))
    simulation.run()
    path = writer.path
    assert places(read_objects(path), "policy")
    changes = Changes(policy={"type": f"{__name__}:FcfsByAnotherName"})
    assert verify(path, changes=changes).divergence is None


# --- who meddles -----------------------------------------------------------------------------------------------------


def _applies(objects: Objects) -> Iterator[range]:
    """The places of the decisions of each apply."""
    start = 1
    for place, item in enumerate(objects):
        if item["t"] not in DECISION_TAGS:
            if place > start:
                yield range(start, place)
            start = place + 1


def _two_kinds(objects: Objects) -> tuple[int, int]:
    """Neighbours of one apply, of different kinds."""
    return next(
        (place, place + 1)
        for run in _applies(objects)
        for place in run[:-1]
        if objects[place]["t"] != objects[place + 1]["t"]
    )


def _drop_in_the_middle(objects: Objects) -> int:
    place, _ = _two_kinds(objects)
    del objects[place]
    return place


def _drop_the_last(objects: Objects) -> int:
    place = next(run[-1] for run in _applies(objects) if objects[run[-1]]["t"] == "emit")
    del objects[place]
    return place


def _swap(objects: Objects) -> int:
    first, second = _two_kinds(objects)
    objects[first], objects[second] = objects[second], objects[first]
    return first


def _add_in_the_middle(objects: Objects) -> int:
    _, place = _two_kinds(objects)
    objects.insert(place, {"t": "finish", "s": 0, **_at(objects[place]), "request": 1, "index": 0, "reason": "length",
                           "position": 0})  # fmt: skip
    return place


def _add_at_the_end(objects: Objects) -> int:
    place = next(_applies(objects))[-1] + 1
    objects.insert(place, dict(objects[place - 1]))
    return place


def _at(event: dict[str, Any]) -> dict[str, Any]:
    return {"ts": event["ts"], "c": event["c"]}


def _another_block(objects: Objects) -> int:
    place = next(p for p in places(objects, "launch") if "blocks" in objects[p])
    row = objects[place]["blocks"][0]
    row[2][0] = row[2][0] + 1
    return place


def _another_digest(objects: Objects) -> int:
    place = places(objects, "checkpoint")[0]
    objects[place]["digests"]["blocks"] = "0" * 16
    return place


def _another_count(objects: Objects) -> int:
    """A completion says that its first sampling row produced nothing; the emission behind it gives it away."""
    place = next(p for p in places(objects, "done") if 1 in objects[p]["produced"])
    produced = objects[place]["produced"]
    produced[produced.index(1)] = 0
    return place + 1


def _another_step(objects: Objects) -> int:
    place = places(objects, "done")[3]
    objects[place]["step"] += 1
    return place


def _no_completion(objects: Objects) -> int:
    place = places(objects, "done")[0]
    del objects[place]
    return place


def _no_mark(objects: Objects) -> int:
    place = next(p for p in places(objects, "done") if objects[p + 2]["t"] == "launch")
    del objects[place]["p"]
    return place + 2


def _another_time(objects: Objects) -> int:
    place = places(objects, "arrive")[-1]
    objects[place]["ts"] = 1
    return place


@pytest.mark.parametrize(("change", "code", "exit_code"), [
    (_drop_in_the_middle, "extra_decision", 10),
    (_drop_the_last, "extra_decision", 10),
    (_swap, "reordered_decision", 10),
    (_add_in_the_middle, "missing_decision", 10),
    (_add_at_the_end, "missing_decision", 10),
    (_another_block, "different_decision", 10),
    (_another_digest, "state_digest", 10),
    (_another_count, "different_decision", 10),
    (_no_completion, "missing_decision", 10),
    (_no_mark, "missing_decision", 10),
    (_another_step, "safety", 11),
    (_another_time, "safety", 11),
])  # fmt: skip
def test_meddling_is_found_where_it_was_done(
    fcfs_run: Recording, tmp_path: Path, change: Callable[[Objects], int], code: str, exit_code: int
) -> None:
    where: list[int] = []
    path = tampered(fcfs_run.path, tmp_path / "t", lambda objects: where.append(change(objects)))
    found = divergence_of(verify(path))
    assert (found.code, found.exit_code, found.s) == (code, exit_code, where[0])
    assert found.what


def test_a_changed_block_number_is_named(fcfs_run: Recording, tmp_path: Path) -> None:
    path = tampered(fcfs_run.path, tmp_path / "t", _another_block)
    found = divergence_of(verify(path))
    assert len(found.fields) == 1
    assert found.fields[0].startswith("blocks[0]: recorded ")


def test_every_dropped_decision_is_found(fcfs_run: Recording, tmp_path: Path) -> None:
    checked = 0
    for place, item in enumerate(fcfs_run.objects):
        # The last of a trace cannot be told from a run that was killed before it; here an `end` follows.
        if item["t"] in DECISION_TAGS and place % 7 == 0:
            path = write_objects(tmp_path / "t", fcfs_run.objects[:place] + fcfs_run.objects[place + 1 :])
            # Where two alike stand side by side, the second is the one that is missed.
            assert place <= divergence_of(verify(path)).s <= place + 4
            checked += 1
    assert checked > 10


def test_flipped_bytes_of_a_recorded_run_are_refused(fcfs_run: Recording, tmp_path: Path) -> None:
    content = fcfs_run.path.read_bytes()
    path = tmp_path / "t"
    for at in range(0, len(content) - 1, 997):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with pytest.raises((TraceCorruptError, TraceVersionError), match=r"line|behaviour"):
            verify(path)


# --- how a trace ends ------------------------------------------------------------------------------------------------


def test_a_killed_run_verifies_up_to_its_last_line_wherever_that_is(fcfs_run: Recording, tmp_path: Path) -> None:
    for last in range(2, len(fcfs_run.objects) - 1, 11):
        result = verify(write_objects(tmp_path / "t", fcfs_run.objects[:last]))
        assert (result.exit_code, result.num_events, result.clean_end) == (0, last, False)
        assert len(result.warnings) == 1
        assert "no clean end" in result.warnings[0]


def test_a_torn_last_line_is_a_warning_or_an_error(fcfs_run: Recording, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(fcfs_run.path.read_bytes()[:-9])
    result = verify(path)
    assert (result.exit_code, result.num_events) == (0, len(fcfs_run.objects) - 1)
    assert "is torn" in result.warnings[0]
    with pytest.raises(TornTraceError):
        verify(path, strict=True)


def test_a_trace_that_is_still_being_written_verifies_as_far_as_it_goes(tmp_path: Path, fcfs_run: Recording) -> None:
    with LogWriter(tmp_path, "run") as writer:
        for item in fcfs_run.objects[:50]:
            writer.append(msgspec.json.encode(item)[:-1])
        writer.flush()
        result = verify(writer.path)
    assert (result.exit_code, result.still_being_written, result.num_events) == (0, True, 50)
    assert "still being written" in result.warnings[0]


def test_a_gap_ends_the_verification(fcfs_run: Recording, tmp_path: Path) -> None:
    gap = {"t": "gap", "s": 0, "ts": fcfs_run.objects[40]["ts"], "first": 40, "last": 44, "reason": "disk full"}
    found = divergence_of(verify(write_objects(tmp_path / "t", [*fcfs_run.objects[:40], gap])))
    assert (found.code, found.exit_code, found.s) == ("gap", 14, 40)
    assert "40 to 44" in found.what


def _first_with_blocks(state: dict[str, Any]) -> list[Any]:
    tables = [row[20] for request in state["requests"] for row in request[1]]
    return next(table for table in tables if table)


@pytest.mark.parametrize(
    "meddle",
    [
        lambda state: _first_with_blocks(state).pop(),
        lambda state: _first_with_blocks(state).append(10**6),
        lambda state: state["replicas"][0]["pool"]["free"].clear(),
        lambda state: state["replicas"][0]["pool"]["free"].append(-1),
        lambda state: state["replicas"][0]["steps"][0][4].append(1),
        lambda state: state["requests"].pop(0),
    ],
)
def test_a_segment_whose_snapshot_contradicts_itself_is_damaged(
    tmp_path: Path, meddle: Callable[[dict[str, Any]], None]
) -> None:
    with LogWriter(tmp_path, "run", segment_bytes=4000) as writer:
        Simulation(1, num_requests=16, chaos=CALM, machine=small_machine({"type": "fcfs"}), writer=writer).run()
    segment = sorted(writer.run_folder.glob("trace-*.jsonl"))[2]
    objects = read_objects(segment)
    assert objects[1]["t"] == "snapshot"
    assert verify(segment).exit_code == 0
    meddle(objects[1]["state"])
    h, lines = objects[0]["previous_h"], []
    for body in [msgspec.json.encode(event)[:-1] for event in objects]:
        h = chain(h, body)
        lines.append(close_line(body, h))
    segment.write_bytes(b"".join(lines))
    with pytest.raises(TraceCorruptError, match="damaged at line 2"):
        verify(segment)


def test_a_trace_of_another_version_is_refused(tmp_path: Path) -> None:
    objects = [msgspec.json.decode(encode_body(header(behaviour=99)) + b"}")]
    with pytest.raises(TraceVersionError, match="behaviour 99") as error:
        verify(write_objects(tmp_path / "t", objects))
    assert error.value.exit_code == 13


# --- what the core itself gets wrong ---------------------------------------------------------------------------------


def test_a_core_that_lets_sequences_wait_for_ever_is_told_on(
    fcfs_run: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicaset, "plan_step", lambda *arguments: False)
    found = divergence_of(verify(fcfs_run.path, check_invariants=True))
    assert (found.code, found.exit_code) == ("liveness", 12)
    assert "waits" in found.what


def test_a_core_that_loses_blocks_is_told_on(fcfs_run: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "release_all", lambda self, table: None)
    found = divergence_of(verify(fcfs_run.path, check_invariants=True))
    assert (found.code, found.exit_code) == ("safety", 11)
    assert "references of blocks" in found.what


# --- plug-ins --------------------------------------------------------------------------------------------------------


@pytest.fixture
def canaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "canaries.py").write_text(CANARIES)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["Dice", "Address", "Moody"])
def test_a_nondeterministic_policy_is_caught(canaries: Path, name: str) -> None:
    machine = small_machine({"type": f"canaries:{name}"}, **CROWDED)
    path = record(canaries, machine, num_requests=40)
    found = divergence_of(verify(path, changes=Changes(trust_local_plugins=True)))
    # Mostly a different launch; but a key that is kept can meet a checkpoint before it decides anything.
    assert found.code in ("different_decision", "missing_decision", "extra_decision", "state_digest")
    assert found.exit_code == 10


def test_a_deterministic_local_policy_verifies_if_it_is_trusted(canaries: Path) -> None:
    path = record(canaries, small_machine({"type": "canaries:Steady"}, **CROWDED))
    assert verify(path, changes=Changes(trust_local_plugins=True)).exit_code == 0
    with pytest.raises(UsageError, match="--trust-local-plugins"):
        verify(path)


def test_a_plugin_whose_source_has_changed_is_a_warning_and_explains_a_difference(
    fcfs_run: Recording, tmp_path: Path
) -> None:
    def other_source(objects: Objects) -> None:
        objects[0]["plugins"][0]["source_hash"] = "0" * 16

    path = tampered(fcfs_run.path, tmp_path / "t", other_source)
    result = verify(path)
    assert result.exit_code == 0
    assert len(result.warnings) == 1
    assert "the policy fcfs has another source_hash" in result.warnings[0]
    found = divergence_of(verify(tampered(path, tmp_path / "u", _another_block)))
    assert found.code == "policy_drift"


def test_changes_that_make_no_sense_are_usage_errors(fcfs_run: Recording) -> None:
    with pytest.raises(UsageError, match="did you mean block_size"):
        verify(fcfs_run.path, changes=Changes(settings={"blocksize": 8}))
    with pytest.raises(UsageError, match="made for 4, it cannot change"):
        verify(fcfs_run.path, changes=Changes(settings={"block_size": 8}))
    with pytest.raises(UsageError, match="max_num_seqs"):
        verify(fcfs_run.path, changes=Changes(settings={"max_num_seqs": 0}))


def test_a_run_with_everything_that_goes_wrong_verifies_with_invariants(tmp_path: Path) -> None:
    machine = small_machine({"type": "lrs"}, num_replicas=2, max_steps_in_flight=3)
    path = record(tmp_path, machine, chaos=Chaos(kills=3), seed=5)
    assert verify(path, check_invariants=True).exit_code == 0
