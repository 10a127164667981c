"""A process on another host is like a child, as far as the engine sees it."""

from __future__ import annotations

import asyncio

import pytest

from eventlm.launchers.ray.remote_process import RemoteProcess


async def test_from_start_to_end() -> None:
    kills: list[int] = []
    process = RemoteProcess(lambda: kills.append(1))
    starting = asyncio.create_task(process.started())
    await asyncio.sleep(0)
    assert not starting.done()
    process.note_start(7)
    await starting
    assert (process.pid, process.returncode) == (7, None)
    process.kill()
    assert kills == [1]
    process.note_output(b"one\nt")
    process.note_output(b"wo\n")
    process.note_end(-9)
    assert await process.wait() == process.returncode == -9
    process.note_output(b"last\n")
    process.note_output(b"")
    assert process.stdout is not None
    assert await process.stdout.read() == b"one\ntwo\nlast\n"
    with pytest.raises(ProcessLookupError):
        process.kill()


async def test_one_that_cannot_be_started_has_ended() -> None:
    process = RemoteProcess(lambda: None)
    process.note_end(1, "its node has died")
    await process.started()
    assert (process.pid, process.returncode, process.reason) == (0, 1, "its node has died")


async def test_only_the_first_end_counts() -> None:
    process = RemoteProcess(lambda: None)
    process.note_end(3)
    process.note_end(1, "the driver of Ray died", of_all=True)
    process.note_output(b"")
    process.note_output(b"")
    assert (await process.wait(), process.reason, process.is_end_of_all) == (3, "", False)
