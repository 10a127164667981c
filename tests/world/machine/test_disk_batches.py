"""What a failing disk keeps of a batch's state and results, and that the batch can be resumed from it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from eventlm.server.batches.lines import InputLine, OutputLine, with_response
from eventlm.server.batches.results import Results
from eventlm.system.disk import Disk
from tests.bus.crashes import Killed
from tests.world.machine.disk import WorldDisk
from tests.world.machine.disk_faults import DiskFaults
from tests.world.machine.drawn_disk import ALL_FAULTS, Drawn, Mortal

FOLDER = Path("/batches")
NUM_LINES = 12


def line(number: int) -> OutputLine:
    return with_response("batch_req_", InputLine(number, f"id{number}"), "r", {"text": "x" * 900})


def go_on(disk: Disk, *, ends: bool = True) -> tuple[list[int], list[int]]:
    """Resume a batch. Returns the numbers of the lines that were finished before, and of those finished now."""
    disk.make_folders(FOLDER)
    results = Results(disk, FOLDER / "out.jsonl", FOLDER / "errors.jsonl")
    with contextlib.closing(results):
        results.open(mends=True)
        before = [*results.ended]
        for number in range(1, NUM_LINES + 1):
            if number not in results.ended:
                results.add(line(number))
        if ends:
            results.finish()
        return before, [*results.ended]


ALL = [*range(1, NUM_LINES + 1)]


@pytest.mark.parametrize("has_reboot", [False, True])
def test_a_batch_goes_on_after_its_process_has_died_around_any_call(has_reboot: bool) -> None:
    starts = set()
    for call in range(1, 40):
        for when in ("before", "halfway", "after"):
            disk = WorldDisk(Mortal(call, call, when))
            with contextlib.suppress(Killed):
                go_on(disk.of("engine"))
            if has_reboot:
                disk.reboot()
            disk.crash("engine")
            before, after = go_on(disk.of("next"))
            assert before == ALL[: len(before)]
            assert after == ALL
            disk.write_back()
            disk.reboot()
            assert go_on(disk.of("last")) == (ALL, ALL)
            starts.add(len(before))
    assert len(starts) > 3


def test_results_that_were_finished_outlive_a_reboot_unless_a_sync_failed() -> None:
    num_failed = 0
    for seed in range(60):
        disk = WorldDisk(Drawn(seed))
        go_on(disk.of("engine"), ends=False)
        disk.write_back()
        disk.faults = ALL_FAULTS._replace(bit_rot=0)
        results = Results(disk.of("engine"), FOLDER / "out.jsonl", FOLDER / "errors.jsonl")
        is_finished = False
        with contextlib.closing(results), contextlib.suppress(OSError):
            results.open(mends=True)
            results.add(line(NUM_LINES + 1))
            results.finish()
            is_finished = True
        disk.faults = DiskFaults()
        disk.reboot()
        before, _ = go_on(disk.of("next"))
        assert before[:NUM_LINES] == ALL
        if is_finished:
            assert before == [*ALL, NUM_LINES + 1]
        num_failed += not is_finished
    assert 5 < num_failed < 50
