"""A process that another one has started is watched and ended."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from eventlm.launchers.launcher import ReportedProcess
from eventlm.system.left_process import AdoptedProcess, remove_pipe


async def test_its_end_is_noticed() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")
    adopted = AdoptedProcess(process.pid)
    assert isinstance(adopted, ReportedProcess)
    assert (adopted.returncode, adopted.reason) == (None, "")
    waiting = asyncio.create_task(adopted.wait())
    adopted.kill()
    assert await waiting == 1
    assert (adopted.returncode, adopted.reason) == (1, "its process has ended")
    with pytest.raises(ProcessLookupError):
        adopted.kill()
    assert await process.wait() == -9


async def test_one_that_is_gone_is_none() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await process.wait()
    with pytest.raises(ProcessLookupError):
        AdoptedProcess(process.pid)


def test_the_files_of_its_pipe_go(tmp_path: Path) -> None:
    folder = tmp_path / "pipe"
    folder.mkdir()
    (folder / "in").touch()
    for _ in range(2):
        remove_pipe((f"ipc://{folder}/in", f"ipc://{folder}/out"))
        assert not folder.exists()
