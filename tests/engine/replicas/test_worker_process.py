"""One worker process: what it says arrives, whatever happens to it is noticed, nothing of it remains."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import stat
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from eventlm.engine.replicas import worker_process
from eventlm.engine.replicas.worker_process import StartPatience, WorkerProcess
from eventlm.engine.request import EngineUnavailableError
from eventlm.errors import ExitCode
from eventlm.events.codec import encode_body
from eventlm.system.system import real_system
from eventlm.worker.protocol import (
    FromWorker,
    Heartbeat,
    StartProgress,
    StepResult,
    WorkerDesync,
    WorkerFailed,
    WorkerReady,
    WorkerSetup,
)
from tests.engine.engines import FAKE
from tests.processes import PATIENCE_SECONDS, is_running
from tests.worker.launches import launched, new_sequence, payload

SETUP = WorkerSetup(
    replica=0,
    epoch=1,
    model="fake",
    block_size=16,
    num_blocks=64,
    max_model_len=512,
    max_num_batched_tokens=512,
    max_num_seqs=64,
    fake=FAKE,
)


@asynccontextmanager
async def spawned(**changes: Any) -> AsyncIterator[WorkerProcess]:
    """A worker process that is killed in the end."""
    worker = WorkerProcess(real_system(), structs.replace(SETUP, **changes))
    try:
        await worker.start()
        yield worker
    finally:
        await worker.kill()


async def next_word(worker: WorkerProcess) -> FromWorker | None:
    """The next message that is neither a heartbeat nor of a start under way."""
    while isinstance(message := await worker.receive(PATIENCE_SECONDS), Heartbeat | StartProgress):
        pass
    return message


async def time_out(worker: WorkerProcess, timeout_seconds: float) -> None:
    """Take heartbeats until there is nothing for so long."""
    while True:
        try:
            await worker.receive(timeout_seconds)
        except TimeoutError:
            return


def contents(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]


def send_steps(worker: WorkerProcess, count: int) -> None:
    """A prompt of three tokens and `count - 1` decodes behind it, all in flight at once."""
    first = launched(0, chunks=[(1, 0, 0, 3, 1)], blocks=[(0, 0, [7, 8])])
    worker.send_step(encode_body(first), payload(new_sequence(1, [1, 2, 3])))
    for step in range(1, count):
        worker.send_step(encode_body(launched(step, decodes=[(1, 0, 3, step)])), payload())


async def test_a_worker_gets_ready_takes_steps_in_order_and_leaves_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "LEAVE_SECONDS", PATIENCE_SECONDS)
    async with spawned() as worker:
        ready = await next_word(worker)
        assert isinstance(ready, WorkerReady)
        assert (ready.pid, ready.epoch) == (worker.pid, 1)
        assert len(ready.samples) > 1
        send_steps(worker, 5)
        results = [await next_word(worker) for _ in range(5)]
        assert [result.step for result in results if isinstance(result, StepResult)] == [0, 1, 2, 3, 4]
        await worker.stop()
        assert not is_running(worker.pid)
        # Nobody had to kill it.
        assert worker.ending == "died (exit code 0)"


async def test_calls_that_time_out_lose_no_message() -> None:
    async with spawned(fake=FAKE | {"base_ns": 5_000_000}) as worker:
        await next_word(worker)
        # The first of them comes to a call that has timed out before.
        await time_out(worker, 0.001)
        send_steps(worker, 30)
        steps = []
        while len(steps) < 30:
            try:
                message = await worker.receive(0.001)
            except TimeoutError:
                continue
            assert message is not None
            steps += [message.step] if isinstance(message, StepResult) else []
        assert steps == list(range(30))


async def test_a_message_that_comes_while_the_loop_is_blocked_outlives_the_timeout() -> None:
    async with spawned(fake=FAKE | {"base_ns": 50_000_000}) as worker:
        await next_word(worker)
        send_steps(worker, 3)
        asyncio.get_running_loop().call_later(0.01, time.sleep, 0.3)
        steps = []
        while len(steps) < 3:
            try:
                message = await worker.receive(0.1)
            except TimeoutError:
                continue
            steps += [message.step] if isinstance(message, StepResult) else []
        assert steps == [0, 1, 2]


async def test_a_cancelled_call_loses_no_message() -> None:
    async with spawned() as worker:
        await next_word(worker)
        send_steps(worker, 20)
        steps: list[int] = []
        while len(steps) < 20:
            call = asyncio.create_task(worker.receive(PATIENCE_SECONDS))
            await asyncio.sleep(0.001 if len(steps) % 2 else 0)
            call.cancel()
            [message] = await asyncio.gather(call, return_exceptions=True)
            steps += [message.step] if isinstance(message, StepResult) else []
        assert steps == list(range(20))


async def test_the_last_words_of_a_dead_worker_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # Longer than any thread of this process may have to wait for its turn.
    monkeypatch.setattr(worker_process, "LAST_MESSAGES_SECONDS", 2.0)
    async with spawned() as worker:
        await next_word(worker)
        worker.send_step(encode_body(launched(0, decodes=[(9, 0, 3, 0)])), payload())
        desync = await next_word(worker)
        assert isinstance(desync, WorkerDesync)
        assert "9/0" in desync.detail
        assert await next_word(worker) is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_killed_worker_is_noticed_before_any_timeout(number: int) -> None:
    async with spawned() as worker:
        await next_word(worker)
        os.kill(worker.pid, number)
        assert await next_word(worker) is None


async def test_a_stopped_worker_sends_nothing_and_can_be_killed() -> None:
    async with spawned(heartbeat_ns=20_000_000) as worker:
        await next_word(worker)
        os.kill(worker.pid, signal.SIGSTOP)
        # What it had said before that may still be on its way.
        await time_out(worker, 0.3)
        await worker.kill()
        await worker.kill()
        assert not is_running(worker.pid)


async def test_a_process_that_dies_before_it_listens_blocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with spawned() as worker:
        assert await worker.receive(PATIENCE_SECONDS) is None


async def test_the_loop_runs_on_while_a_worker_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, python = tmp_path / "gate", tmp_path / "python"
    os.mkfifo(gate)
    python.write_text(f'#!/bin/sh\nread -r line < {gate}\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    async with spawned() as worker:
        ready = asyncio.create_task(next_word(worker))
        for _ in range(100):
            await asyncio.sleep(0.001)
        assert not ready.done()
        # The worker cannot begin before this.
        await asyncio.to_thread(gate.write_text, "open\n")
        assert isinstance(await ready, WorkerReady)


async def test_a_failure_to_start_a_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/no/such/python")
        with pytest.raises(EngineUnavailableError, match=r"cannot start worker 0: .*No such file"):
            async with spawned():
                pass


async def test_a_process_without_descriptors_left_for_sockets() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The lowest descriptor that is free; from there on there is none.
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(EngineUnavailableError, match="cannot start worker 0: Too many open files"):
            await WorkerProcess(real_system(), SETUP).start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_temporary_folder_whose_path_is_too_long_for_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tempfile.gettempdir()) / ("d" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    worker = WorkerProcess(real_system(), SETUP)
    try:
        with pytest.raises(EngineUnavailableError, match="cannot start worker 0"):
            await worker.start()
    finally:
        await worker.kill()
    assert contents(folder) == []
    folder.rmdir()


async def test_a_model_that_cannot_be_loaded_is_the_user_s_to_mend(tmp_path: Path) -> None:
    async with spawned(model=str(tmp_path / "none")) as worker:
        failed = await next_word(worker)
        assert isinstance(failed, WorkerFailed)
        assert failed.exit_code == ExitCode.USAGE
        assert str(tmp_path / "none") in failed.message


async def test_sockets_are_private_and_the_command_line_reveals_nothing(nothing_left_behind: Path) -> None:
    async with spawned(model="fake") as worker:
        await next_word(worker)
        [folder] = contents(nothing_left_behind)
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        arguments = command_line(worker.pid)[1:]
        sockets = [f"ipc://{folder}/{name}" for name in ("in", "out")]
        assert arguments == ["-P", "-m", "eventlm.worker.process", *sockets, str(os.getpid())]


async def test_signals_to_the_whole_group_and_code_in_the_current_folder_do_not_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('code of a stranger')")
    monkeypatch.chdir(tmp_path)
    async with spawned() as worker:
        assert isinstance(await next_word(worker), WorkerReady)
        assert os.getpgid(worker.pid) != os.getpgid(0)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker.pid, number)
        send_steps(worker, 1)
        assert isinstance(await next_word(worker), StepResult)


PROGRESS = [
    StartProgress(epoch=1, phase="reading weights"),
    StartProgress(epoch=1, phase="reading weights", done=5, total=9),
    StartProgress(epoch=1, phase="compiling kernels"),
    StartProgress(epoch=1, phase="compiling kernels", done=1, total=2),
]
READY = WorkerReady(epoch=1, pid=1)


class SlowWorker(WorkerProcess):
    """Sends one message after another, each so many seconds of its own clock after the one before."""

    words: list[FromWorker]
    gap_s: float
    now_s = 0.0
    waited_s = 0.0

    def __init__(self) -> None:
        super().__init__(real_system()._replace(clock=self), SETUP)

    def monotonic_ns(self) -> int:
        return round(self.now_s * 1e9)

    def unix_ns(self) -> int:
        raise NotImplementedError

    async def receive(self, timeout_seconds: float) -> FromWorker | None:
        self.now_s += timeout_seconds
        self.waited_s += timeout_seconds
        if not self.words or self.waited_s < self.gap_s:
            raise TimeoutError
        self.waited_s = 0.0
        return self.words.pop(0)


async def answer_of(words: list[FromWorker], *, gap_s: float) -> FromWorker | None:
    """What one who waits for ten seconds gets."""
    worker = SlowWorker()
    worker.words, worker.gap_s = words, gap_s
    try:
        return await worker.answer(10)
    finally:
        await worker.kill()


@pytest.mark.parametrize(
    ("words", "gap_s", "seconds", "silence"),
    [
        ([Heartbeat(epoch=1)], 1, 31, "was silent for 30 s"),
        # Each message counts as a sign.
        ([Heartbeat(epoch=1), *PROGRESS], 29, 5 * 29 + 30, "was silent for 30 s"),
        # A process that has not begun to send loads libraries.
        ([], 1, 600, ""),
    ],
    ids=["stopped", "later", "not begun"],
)
async def test_one_that_is_silent_is_given_up_before_its_time(
    words: list[FromWorker], gap_s: float, seconds: float, silence: str
) -> None:
    worker = SlowWorker()
    worker.words, worker.gap_s = words, gap_s
    try:
        assert await worker.answer(StartPatience(worker, 600, 30)) is None
    finally:
        await worker.kill()
    assert (worker.now_s, worker.given_up) == (seconds, silence)


async def test_a_start_that_goes_on_is_waited_for() -> None:
    assert await answer_of([*PROGRESS * 50, READY], gap_s=9) == READY


async def test_one_that_shows_no_progress_is_not() -> None:
    assert await answer_of([*PROGRESS, READY], gap_s=11) is None
    beats = [Heartbeat(epoch=1)] * 20
    assert await answer_of([PROGRESS[0], *beats, READY], gap_s=1) is None
