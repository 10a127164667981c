"""Workload files come back as they were written; what is wrong in one is named by its line."""

from __future__ import annotations

import stat
from decimal import Decimal
from pathlib import Path

import pytest
from msgspec import structs

from eventlm.bench.input_files import read_arrivals
from eventlm.errors import ExitCode, UsageError
from eventlm.events import CacheFlushed, Paused, PolicySwapped, Resumed, WorkerLost, WorkerUp
from eventlm.events.codec import encode_body
from eventlm.replay.simulate.simulation import simulate
from eventlm.replay.what_if.null_test import null_test
from eventlm.replay.workload.file import WorkloadHeader, read_workload, save_workload, write_workload
from eventlm.replay.workload.recorded_run import read_run
from eventlm.replay.workload.request_line import WorkloadLine
from eventlm.replay.workload.workload import NEVER, SequenceOutput, Workload
from eventlm.scheduling_params import SchedulingParams
from tests.replay.golden import FOLDER
from tests.replay.made_workloads import COST, MILLISECOND, PREDICTOR, make_engine, make_workload

HEADER = '{"t":"workload","format":1,"source":"test","block_size":16}'
REQUEST = HEADER + '\n{"arrival_s":0,"prompt_tokens":1,"output_tokens":1}'
LINES = [
    WorkloadLine(arrival_s=Decimal("0.1234567"), prompt_tokens=40, output_tokens=3, blocks=[7, 8]),
    WorkloadLine(arrival_s=Decimal("3999999.000000001"), prompt_tokens=50, output_tokens=2, max_tokens=9, parent=0),
]


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    size = write_workload(path, WorkloadHeader(format=2, source="test", block_size=16), LINES)
    assert (size.num_requests, size.num_bytes) == (2, path.stat().st_size)
    found = read_workload(path)
    assert (found.source, found.block_size, found.first_free_name) == ("test", 16, 10)
    assert found.requests[0].arrival.blocks == [8, 9]
    first, second = found.requests
    assert (first.arrival_ns, second.arrival_ns) == (123_456_700, 3_999_999_000_000_001)
    assert (first.arrival.max_tokens, first.outputs[0].worker_end) == (3, NEVER)
    assert (second.arrival.max_tokens, second.outputs[0].worker_end) == (9, 2)
    assert (first.parent, second.parent, second.think_ns) == (-1, 0, None)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["fcfs_one_replica", "edf_tight", "fcfs_recurrent", "lpm_space_sharing"])
def test_a_golden_run_comes_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    run = read_run(FOLDER / f"{name}.jsonl")
    path = tmp_path / "w.jsonl"
    save_workload(path, structs.replace(run.workload, incidents=run.external_facts))
    found = read_workload(path)
    again = structs.replace(run, workload=structs.replace(found, incidents=[]), external_facts=found.incidents)
    assert null_test(again, FOLDER / f"{name}.jsonl").difference == ""
    assert found.incidents == run.external_facts
    assert list(found.recorded.values()) == [run.header.core]


@pytest.mark.parametrize("seed", range(4))
def test_a_made_workload_runs_alike(seed: int, tmp_path: Path) -> None:
    workload = structs.replace(
        make_workload(seed),
        incidents=[
            Paused(ts=100 * MILLISECOND),
            Resumed(ts=150 * MILLISECOND),
            WorkerLost(ts=400 * MILLISECOND, replica=0, epoch=1, reason="killed"),
            WorkerUp(ts=500 * MILLISECOND, replica=0, epoch=2),
            CacheFlushed(ts=600 * MILLISECOND),
            PolicySwapped(ts=700 * MILLISECOND, name="lrs"),
            # Of a replica that this engine has not.
            WorkerLost(ts=800 * MILLISECOND, replica=7, epoch=1),
        ],
    )
    path = tmp_path / "w.jsonl"
    save_workload(path, workload)
    found = read_workload(path)
    save_workload(tmp_path / "again.jsonl", found)
    assert (tmp_path / "again.jsonl").read_bytes() == path.read_bytes()
    assert found == workload
    assert _bodies(found) == _bodies(workload)


def _bodies(workload: Workload) -> list[bytes]:
    """All events but the header, which has the time of day."""
    bodies: list[bytes] = []
    engine = make_engine(extra_policy=["lrs"])
    simulate(workload, engine, COST, predictor=PREDICTOR, subscribers=[lambda event: bodies.append(encode_body(event))])
    return bodies[1:]


def test_scores_and_times_below_a_millisecond(tmp_path: Path) -> None:
    request = make_workload(0).requests[0]
    scheduling = SchedulingParams(model="other", kind="score", deadline_ns=1_234_567, slo_tpot_ns=1, parent=3)
    arrival = structs.replace(request.arrival, max_tokens=0, n=1, scheduling=scheduling, seed=str(2**64 - 1))
    request = structs.replace(request, arrival=arrival, outputs=[SequenceOutput(reason="complete")], cancel=None)
    workload = Workload(source="scores", requests=[request], block_size=16, first_free_name=5000)
    save_workload(tmp_path / "w.jsonl", workload)
    assert read_workload(tmp_path / "w.jsonl") == workload
    assert '"deadline_ms":1.234567' in (tmp_path / "w.jsonl").read_text()
    assert "outputs" not in (tmp_path / "w.jsonl").read_text()


def test_a_load_test_reads_it_too(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    write_workload(path, WorkloadHeader(format=2), LINES[:1])
    (arrival,) = read_arrivals(str(path))
    assert (arrival.prompt_tokens, arrival.output_tokens) == (40, 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a workload file"),
        ("TIMESTAMP,ContextTokens\n1,2\n", "eventlm trace import"),
        ('{"t":"header","s":0}\n', "not a workload file"),
        ('{"t":"workload","format":3}\n{}', "format 3, this version reads 1 and 2"),
        (HEADER, "no request"),
        (HEADER + '\n{"arrival_s":0,"prompt_tokens":0,"output_tokens":1}', ":2: .*prompt_tokens"),
        (HEADER + '\n{"arrival_s":0,"prompt_tokens":1,"output_tokens":1,"x":1}', ":2: .*unknown field `x`"),
        (HEADER + '\n{"arrival_s":-1,"prompt_tokens":1,"output_tokens":1}', ":2: a time must lie between"),
        (HEADER + '\n{"arrival_s":1e99,"prompt_tokens":1,"output_tokens":1}', ":2: a time must lie between"),
        (HEADER + '\n\n{"arrival_s":0,"prompt_tokens":1,"outp', ":3: "),
        (
            HEADER + '\n{"arrival_s":2,"prompt_tokens":1,"output_tokens":1}\n'
            '{"arrival_s":1,"prompt_tokens":1,"output_tokens":1}',
            ":3: it arrives before",
        ),
        (HEADER + '\n{"arrival_s":2,"prompt_tokens":1,"output_tokens":1,"parent":0}', ":2: its parent 0"),
        (HEADER + '\n\n{"arrival_s":2,"prompt_tokens":1,"output_tokens":1,"parent":0}', ":3: its parent 0"),
        (
            HEADER.replace("16", "0") + '\n{"arrival_s":0,"prompt_tokens":9,"output_tokens":1,"blocks":[1]}',
            ":2: it has blocks, but the first line has no block_size",
        ),
        (HEADER + '\n{"arrival_s":0,"prompt_tokens":1,"output_tokens":1,"priority":1e99}', ":2: .*priority"),
        (HEADER + '\n{"arrival_s":0,"prompt_tokens":1,"output_tokens":1,"deadline_ms":9999999999}', ":2: .*deadline"),
        ((REQUEST[:-1] + ',"n":2,"outputs":[{}]}'), ":2: outputs has 1 entries, but n is 2"),
        ((REQUEST[:-1] + ',"cancel":{"index":1,"position":1,"delay_ns":0}}'), ":2: cancel.index 1"),
        ((REQUEST[:-1] + ',"cancel":{"index":0,"position":1,"delay_ns":-1}}'), ":2: .*delay_ns"),
        ((REQUEST[:-1] + ',"n":100000}'), ":2: .*`\\$.n`"),
        ((REQUEST[:-1] + ',"group_size":2,"group_index":2}'), ":2: group_index 2"),
        ((REQUEST[:-1] + ',"group_size":2,"group_index":1}'), ":2: a group's requests"),
        ((REQUEST[:-1] + ',"group_size":2}'), "its last group lacks 1"),
        (REQUEST.replace('"output_tokens":1', '"output_tokens":0'), ":2: output_tokens must be 1"),
        (REQUEST + '\n{"t":"pause","ts":-1}', ":3: ts must lie"),
        (REQUEST + '\n{"t":"worker_lost","ts":1,"replica":-1,"epoch":1}', ":3: a replica is 0 or more"),
        (REQUEST[:-1] + ',"blocks":[1,null]}', ":2: .*blocks"),
        (REQUEST + '\n{"t":"arrive","ts":1}', ":3: .*arrive"),
        (REQUEST + '\n{"t":"predictor","ts":1,"coefficients":[1,-2]}', ":3: a predictor has 5"),
        (HEADER.replace("16", "4611686018427387904"), "not a workload file .*block_size"),
        (HEADER.replace("test", "\udcff"), "not a workload file"),
        (HEADER + '\n{"arrival_s":"NaN","prompt_tokens":1,"output_tokens":1}', ":2: a time must lie between"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(UsageError, match=words):
        read_workload(path)


def test_it_is_written_as_all_files_of_a_run_are(tmp_path: Path) -> None:
    """The tests of `whole_file` have the rest."""
    path = tmp_path / "new" / "w.jsonl"
    size = write_workload(path, WorkloadHeader(format=2, block_size=16), LINES)
    assert size.num_bytes == path.stat().st_size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(UsageError, match="No space left on device") as caught:
        write_workload("/dev/full", WorkloadHeader(format=2, block_size=16), LINES)
    assert caught.value.exit_code == ExitCode.FAILED


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the workload"):
        read_workload(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="it is a folder"):
        write_workload(tmp_path, WorkloadHeader(format=2), [])
