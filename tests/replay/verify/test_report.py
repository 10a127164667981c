"""What a verification found, as text and as JSON."""

from __future__ import annotations

import json

from msgspec import structs

from eventlm.events import Admitted, Emitted, Finished
from eventlm.replay.verify.divergence import Code, Divergence, classify, differing_fields, requests_named
from eventlm.replay.verify.report import MAX_EVENT_CHARS, render, render_json
from eventlm.replay.verify.verifier import VerifyResult

CLEAN = VerifyResult(
    path="runs/a/trace.jsonl",
    num_events=12_345,
    num_decisions=4_567,
    num_checkpoints=12,
    clean_end=True,
    still_being_written=False,
)
DIVERGED = VerifyResult(
    path="runs/a/trace.jsonl",
    num_events=58,
    num_decisions=30,
    num_checkpoints=1,
    clean_end=False,
    still_being_written=False,
    divergence=Divergence(
        code="config_drift",
        exit_code=10,
        cause="the replay was given another configuration than the run",
        remedy="leave the change out",
        s=57,
        line=58,
        what="decision 57 differs",
        recorded={"t": "launch", "s": 57, "num_tokens": 16},
        replayed={"t": "launch", "s": 57, "num_tokens": 8},
        fields=["num_tokens: recorded 16, replayed 8", "chunks: recorded 2 entries, replayed 1"],
        chain=['{"t":"launch","s":57,"c":3}', '{"t":"arrive","s":3}'],
        state=["<3.0 PREFILL>", "shared queue: 0 waiting; policy fcfs"],
    ),
)


def test_a_clean_verification_is_one_line() -> None:
    assert render(CLEAN) == "12,345 events, 4,567 decisions verified, tokens not checked (12 checkpoints)"


def test_a_single_one_is_counted_in_the_singular() -> None:
    single = VerifyResult(
        path="t", num_events=1, num_decisions=0, num_checkpoints=1, clean_end=False, still_being_written=True
    )
    assert render(single) == "1 event, 0 decisions verified, tokens not checked (1 checkpoint)"


def test_a_divergence_is_reported_in_full() -> None:
    assert (
        render(DIVERGED)
        == """\
runs/a/trace.jsonl: config_drift at event 57 (line 58): decision 57 differs
30 decisions and 1 checkpoint before it came out as recorded

recorded  {"t":"launch","s":57,"num_tokens":16}
replayed  {"t":"launch","s":57,"num_tokens":8}
differs   num_tokens: recorded 16, replayed 8
          chunks: recorded 2 entries, replayed 1

what led to it, newest first:
  {"t":"launch","s":57,"c":3}
  {"t":"arrive","s":3}

state of the replay:
  <3.0 PREFILL>
  shared queue: 0 waiting; policy fcfs

cause     the replay was given another configuration than the run
remedy    leave the change out"""
    )


def test_what_is_not_there_is_called_nothing_and_what_is_long_is_cut() -> None:
    found = DIVERGED.divergence
    assert found is not None
    long = {"t": "done", "produced": [1] * 5000}
    changed = structs.replace(found, recorded=long, replayed=None, fields=[], chain=[], state=[])
    lines = render(structs.replace(DIVERGED, divergence=changed)).splitlines()
    assert len(lines[3]) == len("recorded  ") + MAX_EVENT_CHARS
    assert lines[3].endswith(" ...")
    assert lines[4] == "replayed  nothing"
    assert not any("what led" in line or "state of" in line for line in lines)


def test_json_holds_everything() -> None:
    clean, diverged = json.loads(render_json(CLEAN)), json.loads(render_json(DIVERGED))
    assert (clean["exit_code"], clean["num_decisions"], clean["divergence"]) == (0, 4567, None)
    assert clean["tokens_checked"] is False
    assert diverged["exit_code"] == diverged["divergence"]["exit_code"] == 10
    assert diverged["divergence"]["fields"][0] == "num_tokens: recorded 16, replayed 8"


def test_fields_that_differ_are_named_with_both_values() -> None:
    before = {"t": "emit", "num_tokens": 3, "dropped": [[0, 1], [2, 1]], "step": 1}
    after = {"t": "emit", "num_tokens": 4, "dropped": [[0, 1], [2, 2]], "by": [1, 0]}
    assert differing_fields(before, after) == [
        "num_tokens: recorded 3, replayed 4",
        "dropped[1]: recorded [2, 1], replayed [2, 2]",
        "step: recorded 1, replayed nothing",
        "by: recorded nothing, replayed [1, 0]",
    ]
    assert differing_fields({"dropped": [1]}, {"dropped": [1, 2]}) == ["dropped: recorded 1 entries, replayed 2"]


def test_first_differences_are_distinguished() -> None:
    admit, emit = Admitted(s=5, request=4), Emitted(s=6, replica=0, step=1, num_tokens=1)
    finish = Finished(s=7, request=4, index=0, reason="eos", position=1)
    assert classify([emit, admit], [admit, emit]) is Code.REORDERED_DECISION
    assert classify([emit], [admit, emit]) is Code.EXTRA_DECISION
    assert classify([emit, admit], [admit]) is Code.MISSING_DECISION
    assert classify([finish, emit], [admit, emit]) is Code.DIFFERENT_DECISION


def test_of_launches_only_the_rows_that_differ_name_requests() -> None:
    before = {"t": "launch", "decodes": [[1, 0, 4, 1], [2, 0, 5, 1]], "chunks": [[9, 0, 0, 4, 1]]}
    after = {"t": "launch", "decodes": [[1, 0, 4, 1], [3, 0, 5, 1]], "chunks": [[9, 0, 0, 4, 1]]}
    assert requests_named(before, after) == [2, 3]
    assert requests_named({"t": "finish", "request": 7}, None) == [7]
