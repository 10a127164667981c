"""A server that records in many small files, while its workers die and its disk fills up."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventlm.cli.main import main
from eventlm.events import WorkerLost
from eventlm.replay.verify.report import render
from eventlm.replay.verify.verifier import verify
from tests.cli.conftest import StartServer
from tests.processes import PATIENCE_SECONDS, wait_until
from tests.serving import Server, fake_text, verified

CANARY = "canary-7f3a"


async def _complete(server: Server, seeds: range, *, max_tokens: int) -> None:
    """All at once; each must get its text."""
    client = server.async_client()

    async def complete(seed: int) -> None:
        done = await client.completions.create(
            model=server.model, prompt=f"{CANARY} {seed}", seed=seed, max_tokens=max_tokens, temperature=1
        )
        assert done.choices[0].text == fake_text(seed, max_tokens)

    await asyncio.gather(*map(complete, seeds))
    await client.close()


async def test_every_file_of_a_run_verifies_alone_and_all_of_them_together(
    start_server: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--record-segment", "16KiB", "--checkpoint-events", "50", "--replicas", "2", "--num-blocks", "60")
    server = start_server("--model", "fake", "--fake", "base_ns=300000", *flags)
    loading = asyncio.create_task(_complete(server, range(16), max_tokens=100))
    folder = server.trace.parent
    await asyncio.to_thread(wait_until, lambda: len(list(folder.glob("trace-*.jsonl"))) > 2)
    # Complete or not, what is there can be read.
    assert main(["replay", str(folder)]) == 0
    assert "is still being written" in capsys.readouterr().err
    await loading
    # What is lost must be under way, however long the reading took.
    loading = asyncio.create_task(_complete(server, range(16), max_tokens=200))
    num_files = len(list(folder.glob("trace-*.jsonl")))
    await asyncio.to_thread(wait_until, lambda: len(list(folder.glob("trace-*.jsonl"))) > num_files)
    os.kill(server.worker_pids[0], signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: "worker lost" in server.stderr)
    await loading
    assert await asyncio.to_thread(server.stop) == 0, server.stderr
    trace = verified(folder)
    assert trace.of(WorkerLost)
    assert (trace.result.clean_end, trace.result.warnings) == (True, [])
    files = sorted(folder.glob("*.jsonl"))
    assert trace.result.num_segments == len(files) > 5
    alone = [verify(path, check_invariants=True) for path in files]
    assert all(result.exit_code == 0 and not result.warnings for result in alone)
    assert sum(result.num_decisions for result in alone) == trace.result.num_decisions
    assert not any(CANARY in path.read_text() for path in files)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 600 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user may not mount anything")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_a_full_disk_leaves_a_gap_and_the_server_goes_on(
    start_server: StartServer, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 400 * 1024)
    server = start_server("--model", "fake", "--fake", "base_ns=100000", "--record", str(small_disk / "runs"))
    for round_ in range(3):
        await _complete(server, range(8 * round_, 8 * round_ + 8), max_tokens=500)
        if "events are lost" in server.stderr:
            break
    complaint = "No space left on device; events are lost until it can be"
    await asyncio.to_thread(wait_until, lambda: complaint in server.stderr)
    ballast.unlink()
    folder = small_disk / "runs" / "latest"
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not list(folder.glob("trace-*.jsonl")):
            await _complete(server, range(8), max_tokens=100)
    assert await asyncio.to_thread(server.stop) == 0, server.stderr
    result = verify(folder, check_invariants=True)
    assert result.divergence is None, render(result)
    assert (result.exit_code, result.clean_end) == (14, True)
    assert result.num_missing > 0
    assert [verify(path).exit_code for path in folder.glob("*.jsonl")] == [0, 0]
    assert main(["replay", str(folder)]) == 14
    printed = capsys.readouterr()
    assert f"gap: {result.num_missing:,} events not recorded; everything before and after is verified" in printed.out
    assert "were not recorded (No space left on device)" in printed.err


@pytest.fixture
def frozen_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that can be frozen: then whoever writes to it hangs."""
    folder, image = tmp_path / "disk", tmp_path / "disk.img"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(32 << 20)
    for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)]):
        if not shutil.which(command[0]) or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("this user may not mount anything")
    yield folder
    subprocess.run(["fsfreeze", "-u", str(folder)], capture_output=True, check=False)
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_while_the_disk_hangs_the_server_goes_on_if_it_may(start_server: StartServer, frozen_disk: Path) -> None:
    flags = ("--record", str(frozen_disk / "runs"), "--record-lag", "gap", "--record-lag-ms", "100")
    server = start_server("--model", "fake", "--fake", "base_ns=100000", *flags)
    await _complete(server, range(4), max_tokens=100)
    await asyncio.to_thread(subprocess.run, ["fsfreeze", "-f", str(frozen_disk)], check=True)
    await _complete(server, range(4, 12), max_tokens=400)
    complaint = "a write took longer than 100 ms; events are lost until the disk answers"
    await asyncio.to_thread(wait_until, lambda: complaint in server.stderr)
    await asyncio.to_thread(subprocess.run, ["fsfreeze", "-u", str(frozen_disk)], check=True)
    await asyncio.to_thread(wait_until, lambda: "is written again" in server.stderr)
    await _complete(server, range(4), max_tokens=100)
    assert await asyncio.to_thread(server.stop) == 0, server.stderr
    folder = frozen_disk / "runs" / "latest"
    result = verify(folder, check_invariants=True)
    assert result.divergence is None, render(result)
    assert (result.exit_code, result.clean_end, result.num_segments) == (14, True, 2)
    assert result.num_missing > 100
