"""Verification under a change, and with plug-ins that are not those that ran: the first altered decision is found."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from eventlm.bus.log_writer import LogWriter
from eventlm.errors import UsageError
from eventlm.events import PolicySwapped
from eventlm.policies.fcfs import Fcfs
from eventlm.replay.rebuild import Changes
from eventlm.replay.verify.divergence import Divergence
from eventlm.replay.verify.verifier import verify
from eventlm.system.system import real_system
from tests.replay.conftest import Recording
from tests.replay.traces import (
    CALM,
    Objects,
    another_block,
    divergence_of,
    indices,
    read_objects,
    record,
    small_machine,
    tampered,
    write_objects,
)
from tests.simulation import Simulation
from tests.workload import MILLISECOND

CROWDED = {"max_num_seqs": 2}
SEQ = re.compile(r'"s":(\d+)')
CANARIES = """
import os
from eventlm.core.plugin import Policy
from eventlm.system.system import real_system

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


@pytest.fixture(scope="module")
def edf_run(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    machine = small_machine({"type": "edf", "min_deadline_ms": 1}, **CROWDED)
    path = record(tmp_path_factory.mktemp("edf"), machine)
    return Recording(path, read_objects(path))


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
    launches = indices(fcfs_run.objects, "launch")
    assert found.s == next(index for index in launches if fcfs_run.objects[index]["num_tokens"] > 8)
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
    writer = LogWriter(real_system(), tmp_path, "run")
    simulation = Simulation(1, chaos=CALM, machine=small_machine({"type": "fcfs"}), writer=writer)
    simulation.at(100 * MILLISECOND, lambda: simulation.engine_core.put_fact(PolicySwapped(name="fcfs")))
    simulation.run()
    path = writer.path
    assert indices(read_objects(path), "policy")
    changes = Changes(policy={"type": f"{__name__}:FcfsByAnotherName"})
    assert verify(path, changes=changes).divergence is None


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
    assert "a plug-in of your own depends on a clock, on chance or on hidden state" in found.remedy


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
    found = divergence_of(verify(tampered(path, tmp_path / "u", another_block)))
    assert found.code == "policy_drift"


def test_changes_that_are_invalid_are_usage_errors(fcfs_run: Recording) -> None:
    with pytest.raises(UsageError, match="did you mean block_size"):
        verify(fcfs_run.path, changes=Changes(settings={"blocksize": 8}))
    with pytest.raises(UsageError, match="the recorded 4, it cannot change"):
        verify(fcfs_run.path, changes=Changes(settings={"block_size": 8}))
    with pytest.raises(UsageError, match="max_num_seqs"):
        verify(fcfs_run.path, changes=Changes(settings={"max_num_seqs": 0}))
