"""`--replicaset NAME:KEY=VALUE,...` of `eventlm replay` and `eventlm branch`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eventlm.cli.replay.replicasets import CHANGES, MODEL, OwnChanges, changes_of, once, parse_replicasets
from eventlm.errors import ExitCode, UsageError
from eventlm.replay.rebuild import SetChanges
from tests.cli.conftest import RunHere
from tests.replay.replicaset_runs import made_sets


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(made_sets(tmp_path_factory.mktemp("runs"), num_requests=30))


def test_keys_are_plugins_settings_and_what_else_a_command_takes() -> None:
    found = parse_replicasets(["a:policy=edf:multiplier=2,blocks=40,replicas=3,cost_model=x.toml", "b:model=there"])
    changes = SetChanges(policy={"type": "edf", "multiplier": 2}, settings={"num_blocks": 40})
    assert found == {
        "a": [OwnChanges(changes, 3, "x.toml")],
        "b": [OwnChanges(SetChanges(), model="there")],
    }
    assert changes_of({name: each[0] for name, each in found.items()}) == {"a": changes}
    assert list(once({"b": found["b"]}, "--execute", allowed=[MODEL])) == ["b"]
    with pytest.raises(UsageError, match="--replicaset a: --verify does not take replicas; leave it out"):
        once({"a": found["a"]}, "--verify", allowed=[CHANGES])
    with pytest.raises(UsageError, match="--replicaset a: --execute does not take policy"):
        once({"a": found["a"]}, "--execute", allowed=[MODEL])


def test_one_replicaset_is_changed_in_several_ways(trace: str, run_here: RunHere) -> None:
    flags = ["--replicaset", "small:policy=lrs", "--replicaset", "small:replicas=1", "--router", "round_robin"]
    code, output, errors = run_here("replay", trace, *flags, "--json")
    assert (code, errors) == (0, "")
    found = json.loads(output)
    names = ["small: lrs", "small: 1 replica"]
    assert [each["name"] for each in found["alternatives"]] == names
    assert [each["description"] for each in found["alternatives"]] == [f"round_robin, {name}" for name in names]
    assert [each["fit"]["num_steps"] > 10 for each in found["replicasets"]] == [True, True]
    made, other = (found["metrics"][f"ttft_p50_model_{model}"] for model in ("made", "other"))
    assert made["recorded"] != other["recorded"]


def test_a_cost_model_for_one(trace: str, run_here: RunHere) -> None:
    flags = ["--replicaset", "small:policy=lrs,cost_model=a100-llama3-8b"]
    code, output, _ = run_here("replay", trace, *flags, "--json")
    assert code == 0
    assert [each["cost_model"]["type"] for each in json.loads(output)["replicasets"]] == ["linear", "roofline"]
    # A run of several gives each its own.
    code, output, _ = run_here("replay", trace, "--policy", "lrs", "--cost-model", trace, "--json")
    assert code == 0
    first, second = json.loads(output)["replicasets"]
    assert first["cost_model"]["base_ps"] < second["cost_model"]["base_ps"]
    assert (first["fit"], second["fit"]) == (None, None)


def test_verified_under_a_change_to_one(trace: str, run_here: RunHere) -> None:
    assert run_here("replay", trace, "--verify", "--replicaset", "main:policy=fcfs")[0] == 0
    code, output, _ = run_here("replay", trace, "--verify", "--replicaset", "small:max_num_batched_tokens=16")
    assert code == ExitCode.DIFFERENT
    assert "different_decision" in output


def test_a_branch_of_one_is_verified(trace: str, tmp_path: Path, run_here: RunHere) -> None:
    flags = ["--draws", "1", "--replicaset", "small:policy=lrs,max_num_seqs=2"]
    code, output, errors = run_here("branch", trace, "--at", "0.2s", *flags, "-o", "out")
    assert (code, errors) == (0, "")
    assert "null test      passed: " in output
    assert "small: lrs, max_num_seqs=2" in output
    code, verified, _ = run_here("replay", str(tmp_path / "out" / "latest"))
    assert code == 0
    assert "earlier ones are not in it" in verified
    objects = [json.loads(line) for line in (tmp_path / "out" / "latest" / "trace.jsonl").read_text().splitlines()]
    assert [(each["name"], each["replicaset"]) for each in objects if each["t"] == "policy"] == [("lrs", 1)]
    assert objects[0]["replicasets"][0]["core"]["max_num_seqs"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "--replicaset", "small"], "such as small:policy=edf"),
        (
            ["replay", "--replicaset", "smal:policy=edf"],
            "no replicaset of this name, but main (made), small (other)",
        ),
        (["replay", "--replicaset", "small:polcy=edf"], "small:polcy=edf: unknown key 'polcy'; did you mean policy?"),
        (["replay", "--replicaset", "small:policy="], "small:policy=: policy has no value"),
        (["replay", "--replicaset", "small:replicas=x"], "replicas=x: must be a number of replicas"),
        (
            ["replay", "--replicaset", "small:model=x"],
            "a what-if does not take model; leave it out",
        ),
        (
            ["replay", "--replicaset", "small:cost_model=a100-llama3-8b"],
            "--replicaset needs an alternative to what was recorded",
        ),
        (
            ["replay", "--policy=lrs", "--replicaset=small:cost_model=a", "--replicaset=small:cost_model=b"],
            "--replicaset small: it has one cost_model, not 2",
        ),
        (
            ["replay", "--verify", "--replicaset=small:policy=lrs", "--replicaset=small:policy=edf"],
            "--replicaset small: --verify takes each replicaset once",
        ),
        (["replay", "--replicaset", "small:num_replicas=3"], "--replicaset small: num_replicas: say replicas instead"),
        (["replay", "--replicaset", "small:replicas=0"], "replicaset small: replicas: 0 replicas make no sense"),
        (["replay", "--verify", "--replicaset", "small:replicas=3"], "--verify does not take replicas"),
        (["replay", "--execute", "--replicaset", "small:policy=edf"], "--execute does not take policy"),
        (["branch", "--at=0.2s", "--replicaset", "small:replicas=3"], "a branch does not take replicas"),
        (
            ["branch", "--at=0.2s", "--replicaset", "small:num_blocks=30"],
            "replicaset small: --set num_blocks: the cache at event",
        ),
        (["shrink", "--keep", "preemptions > 0", "-o", "x.jsonl"], "several replicasets (main, small), and shrink and"),
    ],
)
def test_mistakes_are_one_line(trace: str, run_here: RunHere, arguments: list[str], message: str) -> None:
    command, *flags = arguments
    code, output, errors = run_here(command, trace, *flags)
    assert (code, output) == (2, "")
    assert message in errors
    assert errors.count("\n") == 1
