"""Tables of requests and steps: every sequence and step once, with what the metrics and the events say of it."""

from __future__ import annotations

import csv
import stat
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.errors import UsageError
from eventlm.events import Forwarded
from eventlm.metrics.trace_metrics import trace_stats
from eventlm.replay.export import tables as export_module
from eventlm.replay.export.tables import REQUEST_COLUMNS, STEP_COLUMNS, TEXT_COLUMNS, export
from tests.replay.backend_runs import record_backends
from tests.replay.golden import FOLDER
from tests.replay.traces import Objects, read_objects, tampered
from tests.replay.workload_runs import record

GOLDEN = FOLDER / "lrs_dying_workers.jsonl"
Rows = list[dict[str, Any]]


def as_csv(path: Path, folder: Path) -> tuple[Rows, Rows]:
    export(path, folder, to="csv")
    tables = []
    for name, columns in (("requests", REQUEST_COLUMNS), ("steps", STEP_COLUMNS)):
        with (folder / f"{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert tuple(rows[0]) == columns
        tables.append(
            [
                {key: text if key in TEXT_COLUMNS else int(text) if text else None for key, text in row.items()}
                for row in rows
            ]
        )
    return tables[0], tables[1]


@pytest.fixture(scope="module", params=["golden", "random"])
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "golden":
        return GOLDEN
    folder = tmp_path_factory.mktemp("runs")
    record(folder, 5)
    return folder / "seed-5"


def objects_of(trace: Path) -> Objects:
    if trace.is_file():
        return read_objects(trace)
    files = [*sorted(trace.glob("trace-*.jsonl")), trace / "trace.jsonl"]
    return [item for file in files for item in read_objects(file)]


def test_every_sequence_and_every_step_once(trace: Path, tmp_path: Path) -> None:
    requests, steps = as_csv(trace, tmp_path)
    objects = objects_of(trace)
    arrivals = {item["s"]: item for item in objects if item["t"] == "arrive"}
    finishes = {(item["request"], item["index"]): item for item in objects if item["t"] == "finish"}
    expected = [(s, index) for s, item in arrivals.items() for index in range(item.get("n", 1))]
    assert sorted((row["request"], row["index"]) for row in requests) == expected
    for row in requests:
        arrival, finish = arrivals[row["request"]], finishes.get((row["request"], row["index"]))
        assert row["arrived_ns"] == arrival["ts"]
        assert row["prompt_tokens"] == arrival["prompt_tokens"]
        assert row["priority"] == arrival["scheduling"].get("priority", 0)
        assert row["deadline_ns"] == arrival["scheduling"].get("deadline_ns")
        if finish is not None:
            assert (row["outcome"], row["reason"]) == ("finished", finish["reason"])
            assert (row["finished_ns"], row["output_tokens"]) == (finish["ts"], finish["position"])
    emitted = {(item["replica"], item["step"], item["ts"]) for item in objects if item["t"] == "emit"}
    assert {(row["replica"], row["step"], row["completed_ns"]) for row in steps} == emitted
    launches = {item["s"]: item for item in objects if item["t"] == "launch"}
    for row in steps:
        launch = launches[row["launch"]]
        assert (row["launched_ns"], row["batch_tokens"]) == (launch["ts"], launch["num_tokens"])
        decode_tokens = sum(launch["most"][: row["num_decodes"]]) if "most" in launch else row["num_decodes"]
        assert row["batch_tokens"] == row["prompt_tokens"] + decode_tokens
        assert row["end_ns"] - row["start_ns"] == row["execution_ns"]


def test_the_figures_are_those_of_the_report(trace: Path, tmp_path: Path) -> None:
    requests, steps = as_csv(trace, tmp_path)
    values = trace_stats(trace).values
    complete = [
        row for row in requests if row["reason"] in ("eos", "stop_token", "grammar", "stop", "length", "complete")
    ]
    assert sorted(row["e2e_ns"] for row in complete) == sorted(values["request_e2e_time"].elements())
    assert sorted(row["scheduling_delay_ns"] for row in complete if row["scheduling_delay_ns"] is not None) == sorted(
        values["request_scheduling_delay"].elements()
    )
    assert sorted(row["execution_ns"] for row in steps) == sorted(values["batch_execution_time"].elements())


def test_parquet_holds_the_same(trace: Path, tmp_path: Path) -> None:
    tables = as_csv(trace, tmp_path)
    files, _ = export(trace, tmp_path, to="parquet")
    for name, rows, file in zip(("requests", "steps"), tables, files, strict=True):
        found = pyarrow.parquet.read_table(tmp_path / f"{name}.parquet")
        assert str(found.schema.field("replica").type) == "int64"
        assert file.num_rows == found.num_rows
        for before, after in zip(rows, found.to_pylist(), strict=True):
            assert before == {
                key: "" if value is None and key in ("reason",) else value for key, value in after.items()
            }


def test_batches_are_written_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = as_csv(GOLDEN, tmp_path / "whole")
    monkeypatch.setattr(export_module, "BATCH_ROWS", 3)
    assert as_csv(GOLDEN, tmp_path / "parts") == whole
    export(GOLDEN, tmp_path / "parts", to="parquet")
    assert pyarrow.parquet.read_table(tmp_path / "parts/steps.parquet").num_rows == len(whole[1])


def test_rejected_and_unfinished_requests_have_rows_too(tmp_path: Path) -> None:
    def cut(objects: Objects) -> None:
        del objects[len(objects) // 2 :]

    requests, _ = as_csv(tampered(GOLDEN, tmp_path / "t", cut), tmp_path)
    outcomes = {row["outcome"] for row in requests}
    assert outcomes == {"finished", "unfinished"}
    assert all(row["finished_ns"] is None for row in requests if row["outcome"] == "unfinished")

    def reject(objects: Objects) -> None:
        last = max(index for index, item in enumerate(objects) if item["t"] == "arrive")
        del objects[last + 1 :]
        objects.append({"t": "reject", "s": 0, "ts": objects[-1]["ts"], "request": last, "reason": "queue_full"})

    requests, _ = as_csv(tampered(GOLDEN, tmp_path / "t", reject), tmp_path)
    assert {row["reason"] for row in requests if row["outcome"] == "rejected"} == {"queue_full"}


def test_files_are_the_users_own_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, warnings = export(GOLDEN, tmp_path / "a" / "b", to="csv")
    assert warnings == []
    assert [stat.S_IMODE(Path(file.path).stat().st_mode) for file in files] == [0o600, 0o600]
    before = [Path(file.path).read_bytes() for file in files]

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module.CsvWriter, "write", fail)
    with pytest.raises(UsageError, match=r"cannot write to .*: No space left on device"):
        export(GOLDEN, tmp_path / "a" / "b", to="csv")
    assert [Path(file.path).read_bytes() for file in files] == before
    assert len(list((tmp_path / "a" / "b").iterdir())) == 2


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(UsageError, match=r"pip install 'eventlm\[parquet\]'"):
        export(GOLDEN, tmp_path / "none", to="parquet")
    assert not (tmp_path / "none").exists()


def test_other_servers_have_a_table_of_attempts(tmp_path: Path) -> None:
    path = record_backends(tmp_path, 9)
    files, _ = export(path, tmp_path / "tables", to="csv")
    assert [Path(each.path).name for each in files] == ["requests.csv", "steps.csv", "attempts.csv"]
    with (tmp_path / "tables" / "attempts.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    with LogReader(path) as reader:
        events = [line.event() for line in reader]
    sent = {(e.request, e.index, e.attempt): (e.ts, e.replica) for e in events if isinstance(e, Forwarded)}
    found = {
        tuple(int(row[name]) for name in ("request", "index", "attempt")): (int(row["sent_ns"]), int(row["replica"]))
        for row in rows
    }
    assert found == sent
    assert {row["backend"] for row in rows} == {f"backend-{replica}:8000" for _, replica in sent.values()}
    assert {row["end"] for row in rows} >= {"answered", "withdrawn"}
