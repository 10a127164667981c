from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from eventlm.system.processes import SystemProcesses

MODULE = """
import os, sys
print(sys.argv[1:], os.environ.get("EVENTLM_SET"), os.environ.get("EVENTLM_MISSING"), os.getsid(0) == os.getpid())
os.write(int(sys.argv[1]), sys.stdin.buffer.read())
"""


async def test_a_module_runs_with_its_arguments_descriptors_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spawned.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("EVENTLM_SET", "mine")
    reading, writing = os.pipe()
    process = await SystemProcesses().spawn(
        "spawned",
        str(writing),
        "more",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        environment={"EVENTLM_SET": "default", "EVENTLM_MISSING": "default"},
        pass_fds=(writing,),
    )
    os.close(writing)
    output, _ = await process.communicate(b"input")
    assert output.decode() == f"['{writing}', 'more'] mine default True\n"
    assert os.read(reading, 100) == b"input"
    os.close(reading)
    assert process.returncode == 0
    assert SystemProcesses().pid == os.getpid() != process.pid


def test_what_a_process_knows_of_itself() -> None:
    processes = SystemProcesses()
    before = processes.usage()
    data = b"x" * 64 * 1024 * 1024
    after = processes.usage()
    assert processes.parent_pid == os.getppid()
    assert 0 < before.cpu_ns <= after.cpu_ns
    assert after.resident_bytes - before.resident_bytes > len(data) // 2


def test_an_orphan_learns_it_and_ends_at_once() -> None:
    code = """
        import os, sys, threading
        from eventlm.system.processes import SystemProcesses
        from eventlm.system.threads import run_blocking
        # Python waits for this thread where a process ends in order.
        threading.Thread(target=threading.Event().wait).start()
        run_blocking(SystemProcesses().orphaned(os.getppid() + 1))
        SystemProcesses().exit(7, "alone")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (7, "alone\n")


def test_a_process_ends_though_nobody_reads_its_last_line() -> None:
    code = "from eventlm.system.processes import SystemProcesses; SystemProcesses().exit(7, 'alone')"
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run([sys.executable, "-c", code], check=False, stderr=writing, timeout=60)
    os.close(writing)
    assert ended.returncode == 7


async def test_nothing_is_imported_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spawned.py").write_text("")
    monkeypatch.chdir(tmp_path)
    process = await SystemProcesses().spawn(
        "spawned", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    assert await process.wait() == 1


async def test_a_killed_process_has_the_signal_as_its_status() -> None:
    process = await SystemProcesses().spawn("timeit", "while True: pass", stdout=asyncio.subprocess.DEVNULL)
    assert process.returncode is None
    process.kill()
    assert await process.wait() == process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        process.kill()


def test_orphans_of_its_children_are_ended() -> None:
    code = """
        import asyncio, subprocess, sys
        from pathlib import Path
        from eventlm.system.processes import SystemProcesses

        PARENT = "import subprocess, sys; print(subprocess.Popen(['sleep', '1000'], stdout=-3).pid)"

        def running(pid):
            return Path(f"/proc/{pid}").exists()

        processes = SystemProcesses()
        processes.adopt_orphans()
        spawned = subprocess.Popen(["sleep", "1000"], stdout=-3)
        orphans = [int(subprocess.run([sys.executable, "-c", PARENT], stdout=-1).stdout) for _ in range(2)]
        before = [running(pid) for pid in orphans]
        asyncio.run(processes.end_orphans({spawned.pid}))
        print(before, [running(pid) for pid in orphans], spawned.poll())
        spawned.kill()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "[True, True] [False, False] None\n", ended.stderr
