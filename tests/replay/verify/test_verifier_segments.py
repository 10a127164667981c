"""Verification over the segments of a run: together, alone, under a change, and with a snapshot that is wrong."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import msgspec
import pytest

from eventlm.bus.log_writer import LogWriter
from eventlm.errors import TraceCorruptError, UsageError
from eventlm.events import UserMark
from eventlm.events.codec import chain, close_line, encode_body, split_line
from eventlm.replay.rebuild import Changes
from eventlm.replay.verify.report import render
from eventlm.replay.verify.verifier import verify
from eventlm.system.system import real_system
from tests.replay.traces import CALM, divergence_of, read_objects, small_machine
from tests.simulation import Simulation

SEQ = re.compile(r'"s":(\d+)')


@pytest.fixture(scope="module")
def segmented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in several files."""
    with LogWriter(real_system(), tmp_path_factory.mktemp("segments"), "run", segment_bytes=4096) as writer:
        Simulation(1, chaos=CALM, machine=small_machine({"type": "fcfs"}), writer=writer).run()
    return writer.run_folder


def _copy(folder: Path, target: Path) -> list[Path]:
    shutil.copytree(folder, target)
    return sorted(target.glob("trace-*.jsonl"))


def test_a_run_goes_on_after_segments_that_are_not_kept(segmented: Path, tmp_path: Path) -> None:
    whole = verify(segmented, check_invariants=True)
    assert (whole.exit_code, whole.first_s, whole.clean_end) == (0, 0, True)
    assert whole.num_segments > 4
    first, second, *_ = _copy(segmented, tmp_path / "run")
    num_first = verify(first).num_decisions
    first.unlink()
    rest = verify(tmp_path / "run", check_invariants=True)
    assert (rest.exit_code, rest.clean_end, rest.warnings) == (0, True, [])
    assert rest.first_s == int(second.stem.partition("-")[2])
    assert rest.num_decisions == whole.num_decisions - num_first
    assert f"from event {rest.first_s:,} on, earlier ones are not in it" in render(rest)
    # A file by itself says nothing of what is kept beside it.
    assert f"from event {rest.first_s:,} on, earlier ones are not in it" in render(verify(second))


def test_under_a_change_a_later_segment_shows_what_it_would_have_altered(segmented: Path) -> None:
    later = sorted(segmented.glob("trace-*.jsonl"))[2]
    found = divergence_of(verify(later, changes=Changes(settings={"max_num_batched_tokens": 2})))
    assert found.code == "config_drift"
    assert found.path == str(later)
    for changes in (Changes(policy={"type": "edf"}), Changes(settings={"num_blocks": 100})):
        with pytest.raises(UsageError, match="begins in the middle of the run"):
            verify(later, changes=changes)


def test_a_snapshot_of_another_state_is_a_divergence(segmented: Path, tmp_path: Path) -> None:
    path = _copy(segmented, tmp_path / "run")[2]
    objects = read_objects(path)
    objects[1]["state"]["num_routed"] += 1
    body_lines = []
    previous_h = objects[0]["previous_h"]
    for item in objects:
        body = msgspec.json.encode(item)[:-1]
        previous_h = chain(previous_h, body)
        body_lines.append(close_line(body, previous_h))
    path.write_bytes(b"".join(body_lines))
    for later in [*sorted((tmp_path / "run").glob("trace-*.jsonl"))[3:], tmp_path / "run" / "trace.jsonl"]:
        later.unlink()
    found = divergence_of(verify(tmp_path / "run"))
    assert (found.code, found.exit_code, found.path) == ("snapshot", 10, str(path))
    assert "num_routed differ" in found.what
    assert verify(path, changes=Changes(settings={"max_skips": 8})).exit_code == 0


def test_a_segment_without_its_snapshot_cannot_be_verified(segmented: Path, tmp_path: Path) -> None:
    path = _copy(segmented, tmp_path / "run")[2]
    first, second = path.read_bytes().splitlines(keepends=True)[:2]
    body = encode_body(UserMark(s=int(SEQ.findall(second.decode())[0]), text="in its place"))
    previous = split_line(first[:-1])
    assert previous is not None
    path.write_bytes(first + close_line(body, chain(previous.claimed_h, body)))
    with pytest.raises(TraceCorruptError, match="has no snapshot"):
        verify(path)
