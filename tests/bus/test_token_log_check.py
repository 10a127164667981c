"""What `trace check` finds in the token logs of a run: facts without their tokens, damage, files that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.bus.token_log_check import TokenLogCheck, check_token_logs
from eventlm.events.codec import encode_body
from eventlm.system.system import real_system
from tests.bus import token_logs, traces
from tests.replay.executions import record_with_tokens

SEGMENT_BYTES = 8192


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of several files."""
    return record_with_tokens(tmp_path, 1, segment_bytes=SEGMENT_BYTES)


def checked(run: Path) -> TokenLogCheck:
    found = check_token_logs(run)
    assert found is not None
    return found


def test_a_whole_run_has_the_tokens_of_all_facts(run: Path) -> None:
    told: list[tuple[int, int]] = []
    found = check_token_logs(run, on_progress=lambda done, total: told.append((done, total)))
    with LogReader(run) as reader:
        assert reader.num_segments > 2
        tags = [line.tag for line in reader]
    assert found == TokenLogCheck(
        num_prompts=tags.count("arrive"), num_steps=tags.count("done"), num_without=0, missing=[], damage=[]
    )
    assert found.is_sound
    assert len(told) >= tags.count("done")


def test_a_trace_without_tokens_has_none_to_check(tmp_path: Path) -> None:
    with LogWriter(real_system(), tmp_path, "run") as writer:
        writer.append(encode_body(traces.header()))
    assert check_token_logs(writer.run_folder) is None


def test_damage_is_named_and_counted(run: Path) -> None:
    whole = checked(run)
    path = run / "tokens-000000000000.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    index = next(index for index, line in enumerate(lines) if b'"outputs"' in line)
    lines[index] = lines[index].replace(b'"tokens":[', b'"tokens": [')
    path.write_bytes(b"".join(lines))
    found = checked(run)
    assert (found.num_steps, found.num_without, found.is_sound) == (whole.num_steps - 1, 1, False)
    assert found.damage == [f"{path} is damaged at line {index + 1}, byte {sum(map(len, lines[:index]))}"]
    # Lines that are gone with the end of the file leave no trace in it, but the facts are there.
    path.write_bytes(b"".join(lines[:index]))
    found = checked(run)
    assert (found.damage, found.is_sound) == ([], False)
    assert found.num_without == sum(b'"prompt"' in line or b'"outputs"' in line for line in lines[index:])
    path.write_bytes(b"nonsense\n")
    assert checked(run).damage == [
        f"{path} is damaged at line 1, byte 0: it is not the first line of a token log",
    ]


def test_tokens_that_cannot_be_those_of_the_fact_count_for_nothing(run: Path) -> None:
    def shorten(lines: list[dict[str, list[int]]]) -> None:
        next(line for line in lines if line["t"] == "prompt")["token_ids"].pop()

    token_logs.tamper(run / "tokens-000000000000.jsonl", shorten)
    found = checked(run)
    assert (found.num_without, found.damage, found.is_sound) == (1, [], False)


def test_what_was_removed_is_missing_and_no_damage(run: Path) -> None:
    whole = checked(run)
    (run / "tokens.jsonl").unlink()
    found = checked(run)
    assert found.is_sound
    assert found.missing == [
        f"the token log of {run / 'trace.jsonl'} is missing: the file tokens.jsonl that was written beside it with "
        "--record-tokens"
    ]
    assert found.num_steps < whole.num_steps
    for path in run.glob("tokens*"):
        path.unlink()
    found = checked(run)
    assert (found.num_prompts, found.num_steps, found.is_sound) == (0, 0, True)
    assert len(found.missing) == len(list(run.glob("trace*")))
