"""The controller of front ends, with processes that start fast and behave badly; real ones are in tests/cli."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import structlog
from msgspec import structs

from eventlm.config import Config, WorkerConfig
from eventlm.engine.request import EngineUnavailableError
from eventlm.frontend import front_end
from eventlm.frontend.front_end import FrontEnd
from eventlm.frontend.front_ends import FrontEndController
from eventlm.frontend.link import FrontEndLink
from eventlm.frontend.process import OwnFrontEnds
from eventlm.frontend.protocol import FrontEndSetup, StateChanged
from eventlm.system.system import real_system
from tests.processes import is_running

ROOT = Path(__file__).parents[2]
SETUP = FrontEndSetup(
    index=0, config=Config(), model="fake", model_names=["m"], max_model_len=8, vocab_size=8, origin_ns=0, created=1
)


class EngineStub:
    """As much of an engine as there is without requests."""

    state = "loading"
    paused = False
    has_worker = True
    num_waiting_for_room = 0
    max_model_len = 512
    origin_ns = 0
    edges_return = False
    models: ClassVar[dict[str, Any]] = {}
    setups: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.on_state: list[Callable[[], None]] = []
        self.lost: list[int] = []
        self.defect: Exception | None = None

    def lose_front_end(self, index: int) -> None:
        self.lost.append(index)
        if self.defect is not None:
            raise self.defect


class Run:
    """A controller, and what its engine heard."""

    def __init__(self, tmp_path: Path, num_front_ends: int, heartbeat_timeout_seconds: int) -> None:
        self.engine = EngineStub()
        self.starts = tmp_path / "starts"
        worker = WorkerConfig(heartbeat_timeout_seconds=heartbeat_timeout_seconds)
        self.sockets = [[socket.create_server(("127.0.0.1", 0))] for _ in range(num_front_ends)]
        self.controller = FrontEndController(
            real_system(),
            self.engine,  # type: ignore[arg-type]
            structs.replace(SETUP, config=Config(worker=worker)),
            OwnFrontEnds(real_system(), "tests.engine.stub_front_end", self.sockets),
        )

    @property
    def num_starts(self) -> int:
        return self.starts.stat().st_size

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    @asynccontextmanager
    async def make(behaviour: str, *, front_ends: int = 1, heartbeat: int = 60) -> AsyncIterator[Run]:
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("STUB_FRONT_END", behaviour)
        monkeypatch.setenv("STUB_STARTS", str(tmp_path / "starts"))
        monkeypatch.setattr(front_end, "RESTART_SECONDS", 0.001)
        run = Run(tmp_path, front_ends, heartbeat)
        try:
            yield run
        finally:
            await run.controller.stop()
        assert run.engine.on_state == []
        assert all(bound.fileno() == -1 for group in run.sockets for bound in group)

    return make


async def test_figures_of_each_and_an_end_in_order(make_run: Any) -> None:
    async with make_run("ready", front_ends=2) as run:
        await run.controller.start()
        pids = run.controller.pids
        await run.until(lambda: all(figures.cpu_ns for figures in run.controller.metrics))
        assert [(each.index, each.is_up, each.num_requests) for each in run.controller.metrics] == [
            (1, True, 1),
            (2, True, 2),
        ]
        run.controller.reload()
        await run.until(lambda: [figures.num_requests for figures in run.controller.metrics] == [99, 99])
        assert await run.controller.begin_drain() == 6
        await run.controller.drain(asyncio.Event(), timeout_seconds=60)
        assert not any(map(is_running, pids))
        assert not run.engine.lost


async def test_who_does_not_leave_is_killed(make_run: Any) -> None:
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with make_run("stubborn") as run:
        await run.controller.start()
        [pid] = run.controller.pids
        assert await run.controller.begin_drain() == 3
        with structlog.testing.capture_logs() as logs:
            await run.controller.drain(asyncio.Event(), timeout_seconds=0.05)
        assert not is_running(pid)
        assert [(log["event"], log["pid"]) for log in logs] == [("front end does not exit and is killed", pid)]
    # What nobody awaits any more is told to the loop when it is collected.
    gc.collect()
    assert complaints == []


async def test_without_a_descriptor_for_the_connection_it_is_tried_again(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_run("ready") as run:
        await run.controller.start()
        failures = [OSError(errno.EMFILE, "Too many open files")] * 2
        pair = socket.socketpair

        def scarce() -> tuple[socket.socket, socket.socket]:
            if failures:
                raise failures.pop()
            return pair()

        monkeypatch.setattr(socket, "socketpair", scarce)
        [pid] = run.controller.pids
        os.kill(pid, signal.SIGKILL)
        await run.until(lambda: run.controller.metrics[0].is_up and run.controller.pids != [pid])
        assert not failures


async def test_a_killed_one_is_reported_and_comes_back(make_run: Any) -> None:
    async with make_run("ready") as run:
        await run.controller.start()
        [pid] = run.controller.pids
        await run.until(lambda: run.controller.metrics[0].http_requests == [("/", "GET", "2xx", 3, 30)])
        os.kill(pid, signal.SIGKILL)
        await run.until(lambda: run.controller.metrics[0].num_restarts == 1 and run.controller.metrics[0].is_up)
        # Those of the dead process, and those of the next.
        await run.until(lambda: run.controller.metrics[0].http_requests == [("/", "GET", "2xx", 6, 60)])
        assert run.engine.lost == [1]
        assert run.controller.pids != [pid]
        assert not run.controller.all_dead.is_set()


async def test_present_and_later_front_ends_learn_of_a_reduced_context(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    async with make_run("ready") as run:
        await run.controller.start()
        monkeypatch.setattr(FrontEnd, "send", lambda self, message: told.append(message))
        run.engine.state, run.engine.max_model_len = "ready", 160
        run.engine.on_state[0]()
        assert told == [StateChanged(state="ready", paused=False, max_model_len=160)]
        monkeypatch.undo()
        monkeypatch.setattr(FrontEndLink, "send", lambda self, message: told.append(message))
        os.kill(run.controller.pids[0], signal.SIGKILL)
        await run.until(lambda: len(told) > 1)
        assert (told[1].state, told[1].max_model_len) == ("ready", 160)


async def test_a_defect_gives_it_up_and_leaves_no_process(make_run: Any) -> None:
    async with make_run("ready") as run:
        await run.controller.start()
        [pid] = run.controller.pids
        run.engine.defect = RuntimeError("a defect")
        os.kill(pid, signal.SIGKILL)
        await run.until(run.controller.all_dead.is_set)
        assert run.controller.pids == [0]


async def test_a_failure_before_a_loss_is_reported_leaves_no_requests(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: Any) -> str:
        raise RuntimeError("a defect")

    monkeypatch.setattr(front_end.FrontEnd, "_watch", fail)
    async with make_run("ready") as run:
        await run.controller.start()
        await run.until(run.controller.all_dead.is_set)
        assert run.engine.lost == [1]


async def test_a_silent_one_is_killed_and_comes_back(make_run: Any) -> None:
    async with make_run("silent ready", heartbeat=1) as run:
        await run.controller.start()
        [pid] = run.controller.pids
        await run.until(lambda: run.num_starts == 2 and run.controller.metrics[0].is_up)
        assert not is_running(pid)
        assert run.engine.lost == [1]


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("fails", "front end 1 did not start: there is no tokenizer.json"),
        ("dies", r"front end 1 died \(exit code 7\) while it started; see its output above"),
    ],
)
async def test_one_that_cannot_start_is_an_error(make_run: Any, behaviour: str, message: str) -> None:
    async with make_run(behaviour) as run:
        with pytest.raises(EngineUnavailableError, match=message):
            await run.controller.start()
        assert run.num_starts == 1


async def test_one_that_dies_while_another_engine_connects_to_it_is_started_again(make_run: Any) -> None:
    async with make_run("dies ready") as run:
        run.engine.edges_return = True
        await run.controller.start()
        assert run.num_starts == 2


async def test_one_that_cannot_start_again_is_given_up(make_run: Any) -> None:
    async with make_run("ready dies dies ready fails") as run:
        await run.controller.start()
        os.kill(run.controller.pids[0], signal.SIGKILL)
        # Two that die while they start are no reason to give up.
        await run.until(lambda: run.num_starts == 4 and run.controller.metrics[0].is_up)
        os.kill(run.controller.pids[0], signal.SIGKILL)
        await run.until(run.controller.all_dead.is_set)
        assert run.num_starts == 4 + front_end.MAX_FAILED_STARTS
        assert run.controller.pids == [0]
        assert run.engine.lost == [1, 1]
        # The kernel has nobody to give connections to.
        await run.until(lambda: run.sockets[0][0].fileno() == -1)
