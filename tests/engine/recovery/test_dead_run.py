"""What a run that was left says of its clock, and of what may be missing."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec import structs

from eventlm.bus.segment_file import Extent
from eventlm.engine.recovery.dead_run import ATTEMPT, DeadRun
from eventlm.engine.spool.records import SpoolHead
from eventlm.system.disk import SYSTEM_DISK

HEAD = SpoolHead(
    run="r", trace="r", first_s=0, boot_id="this", origin_ns=500, digest_key=b"", block_names=[], workers=[]
)


def dead_run(folder: Path, head: SpoolHead, *, has_loss: bool = False) -> DeadRun:
    """A run that began at unix time 1000, whose clock stood at 300."""
    return DeadRun(
        folder=folder,
        spool_folder=folder,
        file=Mock(),
        header=Mock(unix_start_ns="1000"),
        head=head,
        end=Extent(0, 0, ""),
        now_ns=300,
        damaged=set(),
        has_loss=has_loss,
    )


def clock(*, boot: str, unix_ns: int = 2000) -> Mock:
    return Mock(boot_id=lambda: boot, unix_ns=lambda: unix_ns, monotonic_ns=lambda: 50)


def test_the_clock_of_a_run_goes_on(tmp_path: Path) -> None:
    run = dead_run(tmp_path, HEAD)
    assert (run.origin_ns(clock(boot="this")), run.reason(clock(boot="this"))) == (500, "process")
    # After a reboot it is found by the wall clock, which may have been set back.
    assert (run.origin_ns(clock(boot="next")), run.reason(clock(boot="next"))) == (50 - 1000, "reboot")
    assert run.origin_ns(clock(boot="next", unix_ns=1100)) == 50 - 301


@pytest.mark.parametrize(
    ("boot", "waits", "has_loss", "may_lack"),
    [
        ("this", False, False, False),
        ("this", False, True, True),
        ("next", True, False, False),
        ("next", False, False, True),
    ],
)
def test_outputs_may_be_missing(tmp_path: Path, boot: str, *, waits: bool, has_loss: bool, may_lack: bool) -> None:
    run = dead_run(tmp_path, structs.replace(HEAD, outputs_wait_for_syncs=waits), has_loss=has_loss)
    assert run.may_lack_outputs(clock(boot=boot)) == may_lack


def test_attempts_are_forgotten(tmp_path: Path) -> None:
    for name in (f"{ATTEMPT}1", "spool-0"):
        (tmp_path / name).touch()
    dead_run(tmp_path, HEAD).forget_attempts(SYSTEM_DISK)
    assert [path.name for path in tmp_path.iterdir()] == ["spool-0"]
