"""The worker process's loop, spoken to over its sockets, with the engine played by the test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from eventlm.errors import ExitCode
from eventlm.events.codec import encode_body
from eventlm.sampling_params import SamplingParams
from eventlm.system.clock import SystemClock
from eventlm.system.pipes import ParentPipe
from eventlm.system.shared_folder import StepBoard
from eventlm.system.threads import run_blocking
from eventlm.worker.fake.model import FakeModel, fake_samples
from eventlm.worker.fake.tokens import FakeParameters, fake_token
from eventlm.worker.loop import WorkerLoop
from eventlm.worker.process import BETWEEN_S, OUTLIVE_SECONDS, Worker
from eventlm.worker.protocol import (
    FromWorker,
    Heartbeat,
    Peers,
    Shutdown,
    StartProgress,
    StepPayload,
    StepResult,
    WorkerDesync,
    WorkerFailed,
    WorkerReady,
    WorkerSetup,
    decode_from_worker,
    encode,
)
from eventlm.worker.start_report import LOADING_LIBRARIES, MEASURING_STEPS, READING_WEIGHTS
from tests.checkpoints import make_checkpoint
from tests.processes import PATIENCE_SECONDS, is_running, wait_until
from tests.worker.launches import launched, new_sequence, payload
from tests.worker.test_loop import SETUP, SYSTEM

QUICK = {"base_ns": 1_000_000, "decode_ns": 0, "prefill_token_ns": 0, "context_token_ns": 0}
#: No test sees the end of a step that takes an hour.
ENDLESS_NS = 3600 * 10**9


class Peer:
    """The engine's end of a worker process. under: a command that runs it, if not this process."""

    def __init__(self, folder: Path, *, parent_pid: int | None = None, under: Sequence[str] = ()) -> None:
        self.folder = folder
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PUSH)
        self._outbox = self._context.socket(zmq.PULL)
        addresses = [f"ipc://{folder}/{name}" for name in ("in", "out")]
        self._inbox.connect(addresses[0])
        self._outbox.bind(addresses[1])
        command = [sys.executable, "-m", "eventlm.worker.process", *addresses, str(parent_pid or os.getpid())]
        self.process = subprocess.Popen([*under, *command], stderr=subprocess.PIPE, text=True)

    def set_up(self, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "replica": 0,
            "epoch": 1,
            "model": "fake",
            "block_size": 16,
            "num_blocks": 64,
            "max_model_len": 512,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 8,
            "fake": QUICK,
        }
        self._inbox.send(encode(WorkerSetup(**{**fields, **changes})))

    def send(self, body: Any, beside: StepPayload | None = None) -> None:
        self._inbox.send_multipart([encode_body(body), encode(beside or payload())])

    def shut_down(self) -> None:
        self._inbox.send(encode(Shutdown()))

    def hear(self) -> FromWorker:
        assert self._outbox.poll(1000 * PATIENCE_SECONDS), "the worker says nothing"
        message: FromWorker = decode_from_worker(self._outbox.recv())
        return message

    def word(self) -> FromWorker:
        """The next message that is neither a heartbeat nor of a start under way."""
        while isinstance(message := self.hear(), Heartbeat | StartProgress):
            pass
        return message

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._context.destroy(linger=0)


@pytest.fixture
def start() -> Iterator[Callable[..., Peer]]:
    """Start a worker process, which the test's end kills."""
    peers: list[Peer] = []
    with tempfile.TemporaryDirectory() as folder:

        def make(**settings: Any) -> Peer:
            sockets = Path(folder) / str(len(peers))
            sockets.mkdir()
            peers.append(Peer(sockets, **settings))
            return peers[-1]

        yield make
        for peer in peers:
            peer.close()


def test_a_worker_s_life(start: Callable[..., Peer]) -> None:
    peer = start()
    peer.set_up()
    ready = peer.word()
    assert isinstance(ready, WorkerReady)
    assert (ready.epoch, ready.pid, ready.model_fingerprint) == (1, peer.process.pid, "fake")
    assert ready.samples == fake_samples(FakeParameters(**QUICK))
    before_ns = time.monotonic_ns()
    peer.send(
        launched(0, chunks=[(1, 0, 0, 2, 1)], blocks=[(0, 0, [5])]),
        payload(new_sequence(1, [1, 2])),
    )
    peer.send(launched(1, decodes=[(1, 0, 2, 1)]))
    results = [peer.word(), peer.word()]
    end_ns = before_ns
    for step, result in enumerate(results):
        assert isinstance(result, StepResult)
        assert (result.epoch, result.step, result.tokens) == (1, step, [[fake_token(0, 0, step)]])
        assert end_ns <= result.start_ns < result.end_ns <= time.monotonic_ns()
        assert result.end_ns - result.start_ns >= 1_000_000
        end_ns = result.end_ns
    peer.shut_down()
    assert peer.process.wait(PATIENCE_SECONDS) == 0


def test_what_a_step_gives_beside_its_tokens(start: Callable[..., Peer]) -> None:
    peer = start()
    peer.set_up(profile_ops=True)
    peer.word()
    new = new_sequence(1, [1, 2, 3], params=SamplingParams(logprobs=2, prompt_logprobs=0))
    peer.send(launched(0, chunks=[(1, 0, 0, 3, 1)], blocks=[(0, 0, [5])]), payload(new))
    result = peer.word()
    assert isinstance(result, StepResult)
    [beside] = result.extras
    assert beside.logprobs is not None
    assert len(beside.logprobs.top_ids[0]) == 2
    assert beside.prompt_logprobs is not None
    assert len(beside.prompt_logprobs.logprobs) == 2
    assert result.ops == {"base": 1_000_000, "prefill": 0, "decode": 0, "context": 0}


def test_what_it_does_at_its_start_is_reported(start: Callable[..., Peer], tmp_path: Path) -> None:
    peer = start()
    peer.set_up(model=str(make_checkpoint(tmp_path)), threads=1)
    told: list[StartProgress] = []
    while isinstance(message := peer.hear(), Heartbeat | StartProgress):
        told += [message] if isinstance(message, StartProgress) else []
    assert isinstance(message, WorkerReady)
    assert {progress.epoch for progress in told} == {1}
    phases = list(dict.fromkeys(progress.phase for progress in told))
    assert phases == [LOADING_LIBRARIES, READING_WEIGHTS, MEASURING_STEPS]
    *_, last = (progress for progress in told if progress.phase == READING_WEIGHTS)
    assert last.done == last.total > 0


def test_it_measures_only_on_request(start: Callable[..., Peer]) -> None:
    peer = start()
    peer.set_up(warm_up=False)
    ready = peer.word()
    assert isinstance(ready, WorkerReady)
    assert ready.samples == []


def busy_times(peer: Peer, count: int) -> list[int]:
    """Of so many heartbeats of a worker that is busy."""
    found: list[int] = []
    while len(found) < count:
        message = peer.hear()
        assert isinstance(message, Heartbeat)
        if message.busy_ns:
            found.append(message.busy_ns)
    return found


def test_heartbeats_continue_while_it_computes_and_carry_the_time(start: Callable[..., Peer]) -> None:
    peer = start()
    peer.set_up(heartbeat_ns=20_000_000, fake=QUICK | {"base_ns": ENDLESS_NS})
    peer.word()
    sent_ns = time.monotonic_ns()
    peer.send(launched(0, chunks=[(1, 0, 0, 1, 1)], blocks=[(0, 0, [5])]), payload(new_sequence(1, [1])))
    busy_ns = busy_times(peer, 10)
    assert busy_ns == sorted(busy_ns)
    # Between two of them is the time of one at least.
    assert busy_ns[-1] - busy_ns[0] > 9 * 19_000_000
    assert busy_ns[-1] < time.monotonic_ns() - sent_ns


def test_a_worker_whose_step_is_done_is_busy_no_more(start: Callable[..., Peer]) -> None:
    peer = start()
    peer.set_up(heartbeat_ns=5_000_000, fake=QUICK | {"base_ns": 100_000_000})
    peer.word()
    peer.send(launched(0, chunks=[(1, 0, 0, 1, 1)], blocks=[(0, 0, [5])]), payload(new_sequence(1, [1])))
    assert isinstance(peer.word(), StepResult)
    # One of the time before may come behind the result.
    while not (isinstance(message := peer.hear(), Heartbeat) and message.busy_ns == 0):
        pass


def test_a_step_is_not_busy_while_it_waits_for_the_one_before(start: Callable[..., Peer]) -> None:
    peer = start()
    peer.set_up(heartbeat_ns=20_000_000, fake=QUICK | {"prefill_token_ns": 400_000_000, "decode_ns": ENDLESS_NS})
    peer.word()
    peer.send(launched(0, chunks=[(1, 0, 0, 1, 1)], blocks=[(0, 0, [5])]), payload(new_sequence(1, [1])))
    peer.send(launched(1, decodes=[(1, 0, 1, 1)]))
    first = peer.word()
    assert isinstance(first, StepResult)
    # The first of them may be of the time before.
    busy_ns = busy_times(peer, 10)[-1]
    assert busy_ns < time.monotonic_ns() - first.end_ns


def test_after_a_desync_it_computes_nothing_more(start: Callable[..., Peer]) -> None:
    peer = start()
    peer.set_up()
    peer.word()
    peer.send(launched(0, decodes=[(4, 1, 7, 0)]))
    peer.send(launched(1, chunks=[(1, 0, 0, 1, 1)], blocks=[(0, 0, [5])]), payload(new_sequence(1, [1])))
    desync = peer.word()
    assert isinstance(desync, WorkerDesync)
    assert (desync.epoch, desync.step) == (1, 0)
    assert "4/1" in desync.detail
    assert peer.process.wait(PATIENCE_SECONDS) == 1


def test_a_missing_model_is_the_user_s_to_mend(start: Callable[..., Peer], tmp_path: Path) -> None:
    peer = start()
    peer.set_up(model=str(tmp_path / "none"))
    failed = peer.word()
    assert isinstance(failed, WorkerFailed)
    assert failed.exit_code == ExitCode.USAGE
    assert "none" in failed.message
    assert peer.process.wait(PATIENCE_SECONDS) == 1
    assert peer.process.stderr is not None
    assert "Traceback" not in peer.process.stderr.read()


def test_a_defect_is_reported_in_one_line_and_with_its_traceback(start: Callable[..., Peer]) -> None:
    peer = start()
    peer.set_up(fake={"speed": 3})
    failed = peer.word()
    assert isinstance(failed, WorkerFailed)
    assert not failed.exit_code
    assert failed.message.startswith("TypeError: ")
    assert failed.traceback.startswith("Traceback (most recent call last):")
    assert peer.process.wait(PATIENCE_SECONDS) == 1


def test_a_defect_in_a_step_is_reported_without_its_message(start: Callable[..., Peer]) -> None:
    peer = start()
    peer.set_up()
    peer.word()
    too_large = new_sequence(1, [2**63], kind="pool")
    peer.send(launched(0, chunks=[(1, 0, 0, 1, 0)], blocks=[(0, 0, [0])]), payload(too_large))
    failed = peer.word()
    assert isinstance(failed, WorkerFailed)
    assert failed.message == "error"
    assert "in _embedding\n" in failed.traceback
    assert failed.traceback.endswith("\nstruct.error")
    assert peer.process.wait(PATIENCE_SECONDS) == 1


def test_a_death_in_the_middle_of_a_step(start: Callable[..., Peer]) -> None:
    peer = start()
    peer.set_up(fake=QUICK | {"die_ppm": 1_000_000})
    peer.word()
    peer.send(launched(0, chunks=[(1, 0, 0, 1, 1)], blocks=[(0, 0, [5])]), payload(new_sequence(1, [1])))
    assert peer.process.wait(PATIENCE_SECONDS) == 1


@pytest.mark.parametrize("is_set_up", [False, True])
def test_an_orphan_leaves_and_takes_its_folder_along(start: Callable[..., Peer], *, is_set_up: bool) -> None:
    peer = start(parent_pid=1)
    if is_set_up:
        peer.set_up()
    assert peer.process.wait(PATIENCE_SECONDS) == 1
    assert not peer.folder.exists()


def test_an_orphan_rank_takes_along_what_ranks_share(start: Callable[..., Peer], tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    StepBoard(shared, size=1).close()
    # A shell in the engine's place, whose id takes that of the last argument.
    peer = start(under=["sh", "-c", '"$1" "$2" "$3" "$4" "$5" $$ & wait', "sh"])
    peer.set_up(peers=Peers(shared_memory=str(shared)))
    peer.word()
    peer.process.kill()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while shared.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Outlived:
    """A host on which an engine has died. engine_s: for how long there is another one from now on."""

    parent_pid = 5

    def __init__(self, engine_s: float) -> None:
        self.now_s = 0.0
        self._engine_s = engine_s

    def monotonic_ns(self) -> int:
        return round(self.now_s * 1e9)

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def is_running(self, pid: int) -> bool:
        assert pid == 7
        return self.now_s <= self._engine_s


@pytest.mark.parametrize("engine_s", [0, 100])
def test_an_orphan_that_has_a_keeper_waits_for_another_engine(tmp_path: Path, engine_s: int) -> None:
    host = Outlived(engine_s)
    worker = Worker(SYSTEM, f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out")
    worker._system = SYSTEM._replace(processes=host, clock=host, threads=host)  # type: ignore[arg-type]
    worker._loop = WorkerLoop(WorkerReady(epoch=1, pid=1), FakeModel(SETUP, SYSTEM), SystemClock(), print)
    worker._loop.engine_pid = 7 * (engine_s > 0)
    run_blocking(worker._outlive(5))
    assert host.now_s == engine_s + OUTLIVE_SECONDS
    worker._close()


#: A library whose end waits for what does not come.
STUCK = """
import atexit, os, pathlib, time

def wait():
    pathlib.Path("PATH").write_text(str(os.getpid()))
    time.sleep(3600)

atexit.register(wait)
"""


def test_an_orphan_leaves_although_a_library_waits_at_its_end(
    start: Callable[..., Peer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = tmp_path / "pid"
    (tmp_path / "stuck.py").write_text(STUCK.replace("PATH", str(noted)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    peer = start(under=["sh", "-c", '"$1" "$2" "$3" "$4" "$5" $$ stuck & wait', "sh"])
    peer.set_up()
    peer.word()
    peer.shut_down()
    wait_until(lambda: noted.exists() and noted.read_text() != "")
    pid = int(noted.read_text())
    try:
        peer.process.kill()
        wait_until(lambda: not is_running(pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_the_process_of_a_fake_model_never_loads_torch_and_none_loads_asyncio() -> None:
    code = """
        import sys
        import eventlm.worker.process
        assert not {"asyncio", "torch"} & set(sys.modules)
        import eventlm.worker.model_runner, eventlm.worker.warm_up
        own = [name for name in sys.modules if name.startswith("eventlm.")]
        assert not any("asyncio" in vars(sys.modules[name]) for name in own)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_what_was_under_way_is_answered_before_a_desync(start: Callable[..., Peer]) -> None:
    peer = start()
    peer.set_up(fake={**QUICK, "base_ns": 200_000_000})
    assert isinstance(peer.word(), WorkerReady)
    peer.send(launched(0, chunks=[(1, 0, 0, 2, 1)], blocks=[(0, 0, [5])]), payload(new_sequence(1, [1, 2])))
    peer.send(launched(1, decodes=[(1, 0, 7, 1)]))
    assert isinstance(peer.word(), StepResult)
    assert isinstance(peer.word(), WorkerDesync)


class Busy(FakeModel):
    """Has five pieces of work to do ahead; `endless` is never done. A message comes after the fifth."""

    def __init__(self, engine: ParentPipe, *, endless: bool) -> None:
        self.num_pieces = 0
        self._engine, self._endless = engine, endless

    def work_ahead(self) -> bool:
        self.num_pieces += 1
        if self.num_pieces == 5:
            self._engine.send(b"second")
        return self._endless or self.num_pieces < 5


@pytest.mark.parametrize("endless", [False, True])
def test_a_worker_that_waits_works_ahead_until_a_message_comes(endless: bool) -> None:
    engine = SYSTEM.pipes.open()
    worker = Worker(SYSTEM, *engine.addresses)
    runner = Busy(engine, endless=endless)
    loop = WorkerLoop(WorkerReady(epoch=1, pid=1), runner, SystemClock(), print)
    # It does not begin while messages come.
    engine.send(b"first")
    assert run_blocking(worker._pipe.wait(PATIENCE_SECONDS))
    assert run_blocking(worker._receive(loop, runner)) == [b"first"]
    assert runner.num_pieces == 0
    begun = time.monotonic()
    assert run_blocking(worker._receive(loop, runner)) == [b"second"]
    # It checks for a message between two pieces, and pauses.
    assert time.monotonic() - begun >= 0.9 * BETWEEN_S * (runner.num_pieces - 1)
    assert runner.num_pieces >= 5 if endless else runner.num_pieces == 5
    worker._close()
    engine.close()


def test_it_does_not_end_before_its_last_messages_are_sent(tmp_path: Path) -> None:
    worker = Worker(SYSTEM, f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out")
    engine = zmq.Context().socket(zmq.PUSH)
    engine.connect(f"ipc://{tmp_path}/in")
    engine.send(encode(SETUP))
    engine.send_multipart([encode_body(launched(0, decodes=[(4, 1, 7, 0)])), encode(payload())])
    # Nobody listens: they are kept for a second, not only for as long as the process happens to need for its end.
    begun = time.monotonic()
    assert run_blocking(worker.run()) == 1
    assert time.monotonic() - begun > 0.9
    engine.context.destroy(linger=0)


#: A worker that ends while a thread of it waits for a peer.
WAITING = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import torch
from eventlm.worker import process
from eventlm.worker.protocol import Peers
from eventlm.worker.ranks.gloo import GlooReceiver, GlooStore

async def run(self, libraries):
    global groups
    def group(rank):
        return GlooStore(Peers(shared_memory=sys.argv[4]), rank, 2).group("pair", rank, 2)
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(group, range(2)))
    receiver = GlooReceiver(groups[1], 8, torch.float32, stage=0)
    assert not receiver.wait(0.5)
    ENDING

process.Worker.run = run
process.main()
"""


@pytest.mark.parametrize(("ending", "code", "said"), [("return 7", 7, ""), ("raise OSError('no way')", 1, "no way")])
def test_it_ends_in_order_while_a_thread_waits_for_a_peer(tmp_path: Path, ending: str, code: int, said: str) -> None:
    sockets = [f"ipc://{tmp_path}/{name}" for name in ("in", "out")]
    command = [sys.executable, "-c", WAITING.replace("ENDING", ending), *sockets, str(os.getpid()), str(tmp_path)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert ended.returncode == code
    assert ended.stderr.splitlines()[-1:] == ([f"OSError: {said}"] if said else [])
