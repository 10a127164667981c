"""`eventlm explain` as a user runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.cli.main import main
from eventlm.events import Arrived
from eventlm.events.codec import encode_body
from eventlm.system.system import real_system
from tests.replay.explained_logs import read
from tests.replay.golden import BROKEN, FOLDER
from tests.replay.replicaset_runs import made_sets
from tests.replay.traces import CALM, record, small_machine
from tests.simulation import Simulation
from tests.workload import make_core

EDF = str(FOLDER / "edf_tight.jsonl")
FCFS = str(FOLDER / "fcfs_one_replica.jsonl")


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    assert main(["explain", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("eventlm: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_story_and_parts_that_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    output = explained(capsys, EDF, "4.1")
    story, table = output.strip().split("\n\n")
    assert max(map(len, story.splitlines())) <= 100
    first, *_ = story.split(".\n")
    total = re.search(r"took ([\d,.]+) ms and ended with `length`", " ".join(first.split()))
    assert total is not None
    columns, *rows = [line.split() for line in table.splitlines()]
    assert columns == ["part", "ms", "share"]
    times = [int(row[-2].replace(",", "").replace(".", "")) for row in rows]
    assert sum(times[:-1]) == times[-1]
    assert rows[-1][0] == "total"
    assert float(total[1].replace(",", "")) == pytest.approx(times[-1] / 1e6, abs=0.05)
    assert "It was preempted twice: after " in story
    assert "request 64 was admitted in its place (its priority was -1 against 3, and lower goes first)" in " ".join(
        story.split()
    )


def test_all_samples_of_a_request_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(explained(capsys, EDF, "4", "--json"))
    assert (found["path"], found["warnings"]) == (EDF, [])
    assert [each["index"] for each in found["explanations"]] == list(range(found["explanations"][0]["n"]))
    for each in found["explanations"]:
        assert sum(i["end_ns"] - i["start_ns"] for i in each["intervals"]) == each["total_ns"]
        assert sum(part["duration_ns"] for part in each["parts"]) == each["total_ns"]
        assert each["story"][0].startswith(f"Sample 4.{each['index']} of request 4's 3 (")


@pytest.mark.parametrize(
    ("by", "field"),
    [
        ("e2e", "request_e2e_time"),
        ("ttft", "prefill_e2e_time"),
        ("queue", "request_scheduling_delay"),
        ("tpot", "request_time_per_output_token"),
    ],
)
def test_the_slowest_in_order(by: str, field: str, capsys: pytest.CaptureFixture[str]) -> None:
    values = [getattr(row, field) for row in read(Path(EDF)).rows.values()]
    slowest = sorted((value for value in values if value is not None), reverse=True)[:3]
    found = json.loads(explained(capsys, EDF, "--slowest", "3", "--by", by, "--json"))
    assert [row[field] for row in found["rows"]] == slowest
    assert [(e["request"], e["index"]) for e in found["explanations"]] == [
        (row["request"], row["index"]) for row in found["rows"]
    ]
    columns, *rows, last = explained(capsys, EDF, "--slowest", "3", "--by", by).splitlines()
    assert len(rows) == 3
    assert columns.startswith("request  e2e, ms  TTFT, ms  queue, ms  TPOT, ms")
    assert all(re.search(r"  \d+% [a-z]+: [a-z ]+(, behind .*)?$", row) for row in rows)
    assert last == f"the slowest 3 of {sum(value is not None for value in values)} sequences by {by}"


def test_the_newest_run_is_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVENTLM_STATE", str(tmp_path / "state"))
    assert "no run is recorded in" in refused(capsys, "2")
    path = record(tmp_path / "runs", small_machine({"type": "fcfs"}), num_requests=4)
    monkeypatch.setenv("EVENTLM_STATE", str(tmp_path))
    request = next(event.s for event in read(path).events if isinstance(event, Arrived))
    assert main(["explain", str(request)]) == main(["explain", "latest", str(request)]) == 0
    captured = capsys.readouterr()
    assert captured.out == 2 * explained(capsys, str(path.parent), str(request))
    assert captured.err == 2 * f"eventlm: run {path.parent.name}, the newest\n"
    assert "--slowest 10` lists some" in refused(capsys, str(path.parent), "9999")


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, several = tmp_path / "one.png", tmp_path / "several.svg"
    explained(capsys, EDF, "4", "--plot", str(one))
    explained(capsys, EDF, "--slowest", "5", "--plot", str(several))
    assert one.read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in several.read_bytes()
    assert "a picture is a .png, .svg or .pdf file" in refused(capsys, EDF, "4", "--plot", str(tmp_path / "a.txt"))
    assert main(["explain", EDF, "4", "--plot", str(tmp_path / "none" / "a.png")]) == 2
    assert "cannot write the picture" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name one request"),
        ([EDF, "4", "5"], "name one request"),
        ([EDF], f"name a request of {EDF} too, or rank some: `eventlm explain {EDF} --slowest 10`"),
        ([EDF, "cmpl-7f3"], "'cmpl-7f3' is not the number of a request"),
        ([EDF, "cmpl-7f3"], "which the server's log has as `seq` beside the id"),
        (["4", EDF], f"the trace goes first: `eventlm explain {EDF} 4`"),
        ([EDF, "-1"], "'-1' is not the number of a request"),
        ([EDF, "4.x"], "'4.x' is not the number of a request"),
        ([EDF, "1"], "not a request but `worker_up`"),
        ([EDF, "4.9"], "request 4 has fewer samples"),
        ([EDF, "88888"], f"`eventlm explain {EDF} --slowest 10` lists some"),
        ([EDF, "--slowest", "0"], "not a number of at least 1"),
        ([EDF, "--slowest", "201", "--plot", "a.png"], "--plot draws at most 200 sequences"),
        ([EDF, "4", "--slowest", "2"], "--slowest takes no REQUEST"),
        ([EDF, "4", "--by", "ttft"], "--by needs --slowest N"),
        ([EDF, "--slowest", "2", "--by", "itl"], "unknown --by 'itl'"),
        (["nothing-here", "4"], "cannot read the trace nothing-here"),
    ],
)
def test_bad_questions(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, *arguments)


def test_another_run_than_this_version_makes_is_not_explained(capsys: pytest.CaptureFixture[str]) -> None:
    path = FOLDER / f"{BROKEN}.jsonl"
    last = max(event.s for event in read(path).events if isinstance(event, Arrived))
    assert "diverges from its replay" in refused(capsys, str(path), str(last), code=10)


def test_nothing_to_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, _ = make_core(small_machine({"type": "fcfs"}))
    with LogWriter(real_system(), tmp_path, "run") as writer:
        writer.append(encode_body(first))
        writer.flush()
        assert main(["explain", str(writer.path), "--slowest", "3"]) == 0
    captured = capsys.readouterr()
    others = "`eventlm trace ls` lists other runs"
    assert captured.out == f"no request arrived in {writer.path}; {others}\n"
    assert "still being written" in captured.err
    assert f"event 0 of {writer.path} is not a request but `header`, and none arrived in it; {others}" in refused(
        capsys, str(writer.path), "0"
    )
    assert f"has no request 5, and none arrived in it; {others}" in refused(capsys, str(writer.path), "5")


def test_a_request_before_a_segment_in_which_none_arrives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LogWriter(real_system(), tmp_path, "run", segment_bytes=1024) as writer:
        Simulation(1, chaos=CALM, machine=small_machine({"type": "fcfs"}), writer=writer).run()
    segments = sorted(writer.run_folder.glob("trace-*.jsonl"))
    # Its snapshot has those that were under way.
    quiet = next(path for path in reversed(segments) if '\n{"t":"arrive"' not in path.read_text())
    assert f"request 1 ended before {quiet} begins, with event" in refused(capsys, str(quiet), "1")


def test_damage_and_tears_have_their_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = Path(FCFS).read_bytes()
    torn, damaged = tmp_path / "torn", tmp_path / "damaged"
    torn.write_bytes(content[:-3])
    assert main(["explain", str(torn), "--slowest", "2"]) == 0
    assert "is torn" in capsys.readouterr().err
    refused(capsys, str(torn), "--slowest", "2", "--strict", code=4)
    damaged.write_bytes(content.replace(b'"t":"emit"', b'"t":"Emit"', 1))
    refused(capsys, str(damaged), "--slowest", "2", code=3)


def test_the_ranking_names_the_models_if_there_are_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_sets(tmp_path, num_requests=30)
    heading, *rows = explained(capsys, str(run), "--slowest", "30").splitlines()[:-1]
    assert heading.split()[:2] == ["request", "model"]
    with LogReader(run / "trace.jsonl") as log:
        set_of = {each.s: each.replicaset for line in log if isinstance(each := line.event(), Arrived)}
    assert {row.split()[1] for row in rows} == {"made", "other"}
    for row in rows:
        assert row.split()[1] == ("made", "other")[set_of[int(row.split()[0].partition(".")[0])]]
