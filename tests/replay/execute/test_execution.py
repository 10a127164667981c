"""Recorded schedules run again: the same tokens whatever happened, and every difference found where it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from eventlm.bus.log_writer import LogWriter
from eventlm.errors import TraceCorruptError, UsageError
from eventlm.events import Header
from eventlm.replay.execute.execution import ExecuteResult, execute
from eventlm.replay.execute.report import render
from eventlm.system.system import real_system
from eventlm.worker.fake.tokens import fake_token
from eventlm.worker.protocol import FAKE_MODEL, WorkerSetup
from tests.bus import token_logs
from tests.replay.executions import FakeWorkers, execute_fake, record_with_tokens
from tests.replay.replicaset_runs import sets_of
from tests.replay.traces import CALM, Objects, indices, read_objects, small_machine, tampered
from tests.simulation import DIGEST_KEY, Simulation

NUM_WORKLOADS = 30
SEGMENT_BYTES = 8192


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which every request comes to its end, with preemptions and shared prefixes."""
    machine = small_machine({"type": "fcfs"})
    return record_with_tokens(tmp_path_factory.mktemp("calm"), 1, machine=machine, chaos=CALM, num_requests=16)


@pytest.fixture
def run(calm: Path, tmp_path: Path) -> Path:
    """A copy to meddle with."""
    return Path(shutil.copytree(calm, tmp_path / "run"))


def change_trace(run: Path, change: Callable[[Objects], Any]) -> Path:
    return tampered(run / "trace.jsonl", run / "trace.jsonl", change)


def change_fake(run: Path, **parameters: int) -> None:
    """Let the workers of the re-execution have other parameters."""
    change_trace(run, lambda objects: objects[0]["config"]["model"]["fake"].update(parameters))


@pytest.mark.parametrize("first", range(0, NUM_WORKLOADS, 10))
def test_random_workloads_run_again_give_the_same_tokens(first: int, tmp_path: Path) -> None:
    results = []
    for seed in range(first, first + 10):
        run = record_with_tokens(tmp_path, seed, segment_bytes=0 if seed % 4 else SEGMENT_BYTES)
        results.append(execute_fake(run, teacher_force=seed % 3 == 1))
        assert (results[-1].exit_code, results[-1].mismatches, results[-1].warnings) == (0, [], []), f"workload {seed}"
        objects = [item for path in run.glob("trace*") for item in read_objects(path)]
        assert results[-1].num_requests == len(indices(objects, "arrive"))
        assert results[-1].num_tokens == sum(item["num_tokens"] for item in objects if item["t"] == "emit")
        assert results[-1].num_steps == len(indices(objects, "emit"))
    assert sum(result.num_steps for result in results) > 1000


def test_random_workloads_of_several_replicasets_run_again(tmp_path: Path) -> None:
    for seed in range(4):
        run = record_with_tokens(tmp_path, seed, machine=sets_of(seed))
        result = execute_fake(run)
        assert (result.exit_code, result.mismatches, result.warnings) == (0, [], []), f"workload {seed}"
        objects = read_objects(run / "trace.jsonl")
        assert result.num_tokens == sum(item["num_tokens"] for item in objects if item["t"] == "emit")
        numbers = {item.get("replicaset", 0) for item in objects if item["t"] == "arrive"}
        assert len(numbers) == 1 + len(objects[0]["replicasets"])


def test_steps_run_in_the_order_of_their_launches_and_only_if_they_completed(tmp_path: Path) -> None:
    num_never_completed = 0
    for seed in range(8):
        run = record_with_tokens(tmp_path, seed)
        made: list[FakeWorkers] = []

        def make(setups: Sequence[WorkerSetup], header: Header, made: list[FakeWorkers] = made) -> FakeWorkers:
            made.append(FakeWorkers(setups, header))
            return made[0]

        result = execute(run, model=FAKE_MODEL, make_workers=make)
        objects = read_objects(run / "trace.jsonl")
        launched = [(item["replica"], item["epoch"], item["step"]) for item in objects if item["t"] == "launch"]
        executed = made[0].steps
        assert len(executed) == result.num_steps
        for replica in {key[0] for key in executed}:
            own = [key for key in executed if key[0] == replica]
            assert own == [key for key in launched if key in set(own)]
        num_never_completed += len(launched) - len(executed)
    assert num_never_completed > 10


def _flip(run: Path, s: int, row: int, index: int) -> int:
    """Change a token in the token log; what it was."""
    was = 0

    def change(lines: list[dict[str, Any]]) -> None:
        nonlocal was
        (line,) = (line for line in lines if line["s"] == s)
        was = line["tokens"][row][index]
        line["tokens"][row][index] = was + 1000

    token_logs.tamper(run / "tokens.jsonl", change)
    return was


def _rows(objects: Objects, done: dict[str, Any]) -> list[list[int]]:
    launch = next(item for item in objects if item["s"] == done["c"]) if done["c"] else {}
    return launch.get("decodes", []) + launch.get("chunks", [])


def test_a_token_that_differs_is_found_where_it_is(run: Path) -> None:
    objects = read_objects(run / "trace.jsonl")
    # Somewhere in the middle: the position is the sequence's confirmed tokens without its prompt.
    done = next(
        item
        for item in objects[len(objects) // 2 :]
        if item["t"] == "done" and _rows(objects, item) and 1 in item["produced"]
    )
    row = done["produced"].index(1)
    request, index = _rows(objects, done)[row][:2]
    emitted = [item for item in objects if item["t"] == "done" and item["s"] < done["s"]]
    position = sum(
        item["produced"][slot]
        for item in emitted
        for slot, of in enumerate(_rows(objects, item))
        if of[:2] == [request, index]
    )
    was = _flip(run, done["s"], row, 0)
    result = execute_fake(run)
    (found,) = result.mismatches
    assert (found.kind, found.code, found.s, found.step, found.row) == ("token", "token", done["s"], done["step"], row)
    assert (found.request, found.index, found.position) == (request, index, position)
    assert (found.recorded, found.executed) == (was + 1000, was)
    # The trace knows better than the token log.
    assert "do not match the digest in the trace" in found.note
    assert result.exit_code == 10
    assert f"event {done['s']}, step {done['step']} of replica 0, request {request}, index {index}" in found.describe()


def test_tokens_that_were_never_shown_are_not_compared(tmp_path: Path) -> None:
    for seed in range(20):
        run = record_with_tokens(tmp_path, seed)
        objects = read_objects(run / "trace.jsonl")
        dropping = [item for item in objects if item["t"] == "emit" and item.get("dropped")]
        if dropping:
            break
    assert dropping
    for emit in dropping:
        done = next(item for item in reversed(objects[: emit["s"]]) if item["t"] == "done")
        _flip(run, done["s"], emit["dropped"][0][0], 0)
    assert execute_fake(run).mismatches == []


def test_tokens_after_the_end_of_a_text_are_not_compared(tmp_path: Path) -> None:
    chaos = CALM._replace(text_ends=1.0)
    machine = small_machine({"type": "fcfs"})
    run = record_with_tokens(tmp_path, 1, machine=machine, chaos=chaos, num_requests=16)
    objects = read_objects(run / "trace.jsonl")
    ends = {(item["request"], item["index"]): item["position"] for item in objects if item["t"] == "finish"}
    given = dict.fromkeys(ends, 0)
    behind = []
    for item in objects:
        if item["t"] == "done":
            for row, (request, index, *_) in enumerate(_rows(objects, item)):
                if item["produced"][row] and given[request, index] >= ends[request, index]:
                    behind.append((item["s"], row))
                given[request, index] += item["produced"][row]
    assert len(behind) > 5
    for s, row in behind:
        _flip(run, s, row, 0)
    result = execute_fake(run)
    assert (result.exit_code, result.mismatches) == (0, [])
    # One place earlier it counts.
    change_fake(run, piece_ppm=500_000)
    found = execute_fake(run, teacher_force=True).mismatches
    assert found
    assert all(mismatch.position < ends[mismatch.request, mismatch.index] for mismatch in found)


def test_another_worker_is_found_at_its_first_token_and_with_teacher_forcing_at_all(run: Path) -> None:
    objects = read_objects(run / "trace.jsonl")
    seeds = {item["s"]: int(item["seed"]) for item in objects if item["t"] == "arrive"}
    change_fake(run, piece_ppm=50_000)

    def differs(request: int, index: int, position: int) -> bool:
        seed = seeds[request]
        return fake_token(seed, index, position) != fake_token(seed, index, position, piece_ppm=50_000)

    expected = {
        (item["request"], item["index"], position)
        for item in objects
        if item["t"] == "finish"
        for position in range(item["position"])
        if differs(item["request"], item["index"], position)
    }
    assert len(expected) > 5
    forced = execute_fake(run, teacher_force=True)
    assert {(found.request, found.index, found.position) for found in forced.mismatches} == expected
    assert len(forced.mismatches) == len(expected)
    for found in forced.mismatches:
        assert found.recorded == fake_token(seeds[found.request], found.index, found.position)
        assert found.note == ""
    first = execute_fake(run)
    assert first.mismatches == forced.mismatches[:1]
    assert first.num_steps < forced.num_steps == len(indices(objects, "emit"))


def test_another_end_is_found(run: Path) -> None:
    change_fake(run, end_ppm=100_000)
    (found,) = execute_fake(run).mismatches
    assert (found.kind, found.executed) == ("token", 257)
    # By its digest alone one knows that somebody ended.
    token_logs.tamper(run / "tokens.jsonl", _without_outputs)
    (found,) = execute_fake(run).mismatches
    assert (found.kind, found.recorded) == ("end", None)
    assert found.executed in ("eos", "stop_token", "grammar")


def test_blocks_that_were_equal_must_be_equal_again(run: Path) -> None:
    objects = read_objects(run / "trace.jsonl")
    arrivals = [item for item in objects if item["t"] == "arrive" and item.get("blocks")]
    twice = next(item for item in arrivals[1:] if any(item["blocks"][0] in other["blocks"] for other in arrivals[:1]))
    change_trace(run, lambda objects: objects[twice["s"]]["blocks"].__setitem__(0, 1_000_000))
    (found,) = execute_fake(run).mismatches
    assert (found.kind, found.s, found.request) == ("blocks", twice["s"], twice["s"])
    assert found.recorded[0] == 1_000_000
    # A long prompt has hundreds.
    long = structs.replace(found, recorded=list(range(1000)), executed=[1, 2])
    assert "recorded [0, 1, 2, 3, 4, 5, 6, 7] and 992 more, re-executed [1, 2]" in long.describe()


def test_other_names_of_the_same_blocks_are_no_difference(run: Path) -> None:
    def rename(objects: Objects) -> None:
        for item in objects:
            if "blocks" in item and item["t"] == "arrive":
                item["blocks"] = [3 * name + 7 for name in item["blocks"]]
            if "filled" in item:
                item["filled"] = [[row, [3 * name + 7 for name in names]] for row, names in item["filled"]]

    change_trace(run, rename)
    assert execute_fake(run).mismatches == []


def _without_outputs(lines: list[dict[str, Any]]) -> None:
    lines[:] = [line for line in lines if line["t"] != "outputs"]


def test_without_outputs_steps_are_compared_by_their_digests(run: Path, calm: Path) -> None:
    token_logs.tamper(run / "tokens.jsonl", _without_outputs)
    whole, result = execute_fake(calm), execute_fake(run)
    assert (result.exit_code, result.num_tokens, result.num_steps) == (0, whole.num_tokens, whole.num_steps)
    assert (result.num_steps_by_digest, whole.num_steps_by_digest) == (result.num_steps, 0)
    change_fake(run, piece_ppm=50_000)
    forced = execute_fake(run, teacher_force=True)
    # There is nothing to go on with.
    (found,) = forced.mismatches
    assert (found.kind, found.request) == ("digest", -1)
    assert found.s == execute_fake(run).mismatches[0].s


@pytest.mark.parametrize("teacher_force", [False, True])
def test_a_token_log_whose_tokens_come_out_again_must_agree_with_the_trace(run: Path, *, teacher_force: bool) -> None:
    done = next(item for item in read_objects(run / "trace.jsonl") if item["t"] == "done" and any(item["produced"]))
    change_trace(run, lambda objects: objects[done["s"]].update(digest="0" * 16))
    (found,) = execute_fake(run, teacher_force=teacher_force).mismatches
    assert (found.kind, found.s, found.recorded) == ("digest", done["s"], "0" * 16)
    assert "were reproduced, but they do not match the digest in the trace" in found.note


def test_a_damaged_line_of_outputs_costs_only_itself(run: Path) -> None:
    path = run / "tokens.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    index = next(index for index, line in enumerate(lines) if b'"outputs"' in line and b'"tokens":[[' in line)
    lines[index] = lines[index].replace(b'"tokens":[[', b'"tokens":[[1')
    path.write_bytes(b"".join(lines))
    result = execute_fake(run)
    assert (result.exit_code, result.num_steps_by_digest) == (0, 1)
    offset = sum(map(len, lines[:index]))
    assert result.warnings == [f"{path} is damaged at line {index + 1}, byte {offset}"]


def test_a_run_is_executed_up_to_a_prompt_that_is_damaged(run: Path, calm: Path) -> None:
    path = run / "tokens.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    places_of_prompts = [index for index, line in enumerate(lines) if b'"token_ids":[' in line]
    for index in (places_of_prompts[0], places_of_prompts[-1]):
        bad = lines[index].replace(b'"token_ids":[', b'"token_ids":[1')
        path.write_bytes(b"".join([*lines[:index], bad, *lines[index + 1 :]]))
        result = execute_fake(run)
        assert (result.exit_code, result.mismatches) == (3, [])
        assert "tokens.jsonl has no valid line for the prompt of request " in result.damage
        request = int(result.damage.split("request ")[1].split(";")[0])
        before = [item for item in read_objects(run / "trace.jsonl") if item["t"] == "emit" and item["s"] < request]
        assert result.num_steps == len(before)
        assert f"damaged at line {index + 1}," in result.warnings[0]
        assert (result.clean_end, len(result.warnings)) == (True, 1)
        assert ("nothing re-executed" in render(result)) == (not before)
        assert f"the rest cannot be re-executed: {path} has no valid line" in render(result)
    assert result.num_steps > 5


@pytest.mark.parametrize("content", [None, b"nonsense\n"])
def test_a_run_is_executed_up_to_a_token_log_that_is_not_there(tmp_path: Path, content: bytes | None) -> None:
    run = record_with_tokens(tmp_path, 1, segment_bytes=SEGMENT_BYTES)
    (run / "tokens.jsonl").unlink()
    if content is not None:
        (run / "tokens.jsonl").write_bytes(content)
    result = execute_fake(run)
    assert (result.exit_code, result.mismatches) == (3, [])
    closed = [item for path in run.glob("trace-*") for item in read_objects(path) if item["t"] == "emit"]
    assert result.num_steps == len(closed) > 5
    assert ("is missing" if content is None else "is not the first line of a token log") in result.damage


def test_a_trace_without_a_token_log_says_what_to_do(run: Path, tmp_path: Path) -> None:
    (run / "tokens.jsonl").unlink()
    with pytest.raises(UsageError, match=r"the token log of .*trace\.jsonl is missing: the file tokens\.jsonl"):
        execute_fake(run)
    with LogWriter(real_system(), tmp_path, "plain") as writer:
        Simulation(1, writer=writer, num_requests=2, check_every=0).run()
    with pytest.raises(UsageError, match=r"was recorded without token ids.*record with --record-tokens"):
        execute_fake(writer.run_folder)


def test_a_run_is_executed_up_to_a_gap(tmp_path: Path) -> None:
    with LogWriter(real_system(), tmp_path, "run", digest_key=DIGEST_KEY) as writer:
        simulation = Simulation(3, writer=writer, records_tokens=True, check_every=0, chaos=CALM)
        simulation.at(60_000_000, lambda: writer.give_up("as a test has it"))
        simulation.run()
    assert token_logs.facts_without_tokens(writer.run_folder) == []
    result = execute_fake(writer.run_folder)
    assert (result.exit_code, result.mismatches) == (14, [])
    # The run itself came to its end.
    assert (result.clean_end, len(result.warnings)) == (True, 1)
    assert "has a gap: events " in result.warnings[0]
    assert result.num_missing > 0
    assert result.num_steps > 5
    before = [item for item in read_objects(writer.run_folder / "trace-000000000000.jsonl") if item["t"] == "emit"]
    assert result.num_steps == len(before)


@pytest.mark.parametrize("share", [0.1, 0.33, 0.5, 0.77, 0.95])
def test_a_run_that_was_killed_is_executed_as_far_as_it_goes(run: Path, share: float) -> None:
    path = run / "trace.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    tokens = run / "tokens.jsonl"
    tokens.write_bytes(tokens.read_bytes()[:-7])
    result = execute_fake(run)
    assert (result.exit_code, result.mismatches) == (0, [])
    assert "is torn" in result.warnings[0]


@pytest.mark.parametrize(
    ("tag", "change"),
    [
        ("launch", lambda event: event["chunks"][0].__setitem__(0, 99_999)),
        ("arrive", lambda event: event.update(seed="none")),
        ("arrive", lambda event: event.update(seed=str(2**70))),
    ],
)
def test_a_trace_that_was_altered_is_refused(run: Path, tag: str, change: Callable[[dict[str, Any]], None]) -> None:
    change_trace(run, lambda objects: change(objects[indices(objects, tag)[0]]))
    with pytest.raises(TraceCorruptError, match="does not follow from what comes before it; `eventlm replay` finds"):
        execute_fake(run)


def test_progress_comes_to_its_end(calm: Path) -> None:
    told: list[tuple[int, int]] = []
    result: ExecuteResult = execute_fake(calm, on_progress=lambda done, total: told.append((done, total)))
    size = (calm / "trace.jsonl").stat().st_size
    assert (told[-1], len(told)) == ((size, size), result.num_events)
