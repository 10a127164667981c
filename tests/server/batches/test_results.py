"""Files of results: what is over stays, what was cut goes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from eventlm.server.batches.lines import InputLine, LineError, OutputLine, with_response, without_response
from eventlm.server.batches.objects import BatchInputTokens, BatchOutputTokens, BatchUsage, RequestCounts
from eventlm.server.batches.results import Results
from eventlm.system.disk import SYSTEM_DISK, Disk
from tests.server.batches.full_disk import FullDisk

CHAT_USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
RESPONSE_USAGE = {
    "input_tokens": 100,
    "output_tokens": 50,
    "input_tokens_details": {"cached_tokens": None},
    "output_tokens_details": {"reasoning_tokens": 1},
}


def done(number: int, usage: object = None) -> OutputLine:
    return with_response("batch_req_", InputLine(number, f"id{number}"), "r", {"usage": usage, "text": "…" * number})


def failed(number: int) -> OutputLine:
    error = LineError(code="invalid_url", message="No.", line=number)
    return without_response("batch_req_", InputLine(number, None), error)


def open_results(folder: Path, disk: Disk = SYSTEM_DISK) -> Results:
    results = Results(disk, folder / "out.jsonl", folder / "errors.jsonl")
    results.open()
    return results


def numbers(path: Path) -> list[int]:
    return [int(msgspec.json.decode(line)["id"].rpartition("_")[2]) for line in path.read_bytes().splitlines()]


def test_lines_go_where_they_belong_and_are_counted_again_after_a_restart(tmp_path: Path) -> None:
    first = open_results(tmp_path)
    for line in (done(3, CHAT_USAGE), failed(1), done(2, RESPONSE_USAGE), done(7)):
        first.add(line)
    # It was killed: nobody has closed it.
    first.close()
    again = open_results(tmp_path)
    for results in (first, again):
        assert results.counts == RequestCounts(completed=3, failed=1)
        assert results.ended == {3: "id3", 1: None, 2: "id2", 7: "id7"}
        assert results.usage == BatchUsage(
            input_tokens=110,
            input_tokens_details=BatchInputTokens(4),
            output_tokens=55,
            output_tokens_details=BatchOutputTokens(3),
            total_tokens=165,
        )
    assert (numbers(tmp_path / "out.jsonl"), numbers(tmp_path / "errors.jsonl")) == ([3, 2, 7], [1])
    assert again.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    again.finish()


@pytest.mark.parametrize("num_kept", [1, 30, -1])
def test_a_line_that_a_crash_has_cut_is_removed(tmp_path: Path, num_kept: int) -> None:
    results = open_results(tmp_path)
    results.add(done(1))
    results.close()
    path = tmp_path / "out.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:num_kept])
    again = open_results(tmp_path)
    assert path.read_bytes() == whole
    again.add(done(2))
    again.finish()
    assert numbers(path) == [1, 2]


def test_a_line_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path: Path) -> None:
    disk = FullDisk()
    results = open_results(tmp_path, disk)
    results.add(done(1))
    disk.room = 10
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            results.add(done(2))
    assert results.counts == RequestCounts(completed=1)
    disk.room = None
    results.add(done(3))
    assert numbers(tmp_path / "out.jsonl") == [1, 3]
    results.finish()


def test_a_line_that_did_not_fit_is_not_in_the_finished_file(tmp_path: Path) -> None:
    disk = FullDisk()
    results = open_results(tmp_path, disk)
    results.add(done(1))
    disk.room = 10
    with pytest.raises(OSError, match="No space left"):
        results.add(done(2))
    results.finish()
    assert numbers(tmp_path / "out.jsonl") == [1]


def test_one_file_may_have_both(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    for number, line in enumerate((done(1), failed(2)), start=1):
        results = Results(SYSTEM_DISK, path, path)
        results.open()
        results.add(line)
        assert len(results.ended) == number
        results.finish()
    assert numbers(path) == [1, 2]


def test_only_one_process_writes(tmp_path: Path) -> None:
    results = open_results(tmp_path)
    results.add(done(1))
    other = Results(SYSTEM_DISK, tmp_path / "first.jsonl", tmp_path / "out.jsonl")
    other.output.append(done(5))
    other.close()
    for _ in range(2):
        with pytest.raises(BlockingIOError):
            other.open()
    results.finish()
    other.open()
    assert other.counts == RequestCounts(completed=2)
    other.finish()
    # A second call does nothing.
    other.finish()


def test_files_are_private_and_made_when_they_are_needed(tmp_path: Path) -> None:
    results = open_results(tmp_path)
    assert list(tmp_path.iterdir()) == []
    results.add(done(1))
    results.finish()
    assert [(path.name, path.stat().st_mode & 0o777) for path in tmp_path.iterdir()] == [("out.jsonl", 0o600)]
