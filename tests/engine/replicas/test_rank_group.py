"""Ranks of one replica: whichever fails, and however, all end, its own words are the reason, and nothing is lost.

The layout is T2xS2 unless a test says otherwise: ranks 0 and 1 are the first stage, 2 answers.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from eventlm.config import ParallelConfig, WorkerConfig
from eventlm.core.shards import Layout
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.replicas import controller as replica_module
from eventlm.engine.replicas.rank_group import GRACE_SECONDS, Loss, RankGroup
from eventlm.engine.replicas.worker_process import WorkerProcess
from eventlm.engine.setup import worker_setups
from eventlm.events import Launched, StepCompleted, WorkerLost
from eventlm.events.codec import encode_body
from eventlm.launchers.process import ProcessLauncher
from eventlm.system.system import real_system
from eventlm.worker.protocol import (
    FromWorker,
    GrammarBuilt,
    Heartbeat,
    PrepareGrammar,
    StepResult,
    WorkerDesync,
    WorkerFailed,
    WorkerReady,
)
from tests.engine.engines import Reader, expected_tokens, fake_setup, generate, recorded, request, running, verified
from tests.processes import PATIENCE_SECONDS, is_running, wait_until
from tests.worker.launches import launched, new_sequence, payload

LAYOUT = Layout(tensor=2, stages=2)
T2S2 = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
#: Not a pipeline: a sequence has several decodes in flight.
T4 = ParallelConfig(tensor_parallel_size=4)


def lost_in(engine: InferenceEngine) -> list[WorkerLost]:
    return [event for event in recorded(engine) if isinstance(event, WorkerLost)]


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, condition)


async def test_a_group_computes_what_one_worker_does(tmp_path: Path) -> None:
    async with running(record=tmp_path, parallel=T2S2) as engine:
        [pids] = engine.rank_pids
        assert len(set(pids)) == 4
        assert engine.worker_pids == pids[:1]
        readers = await generate(engine, *(request(30, seed=seed, n=2) for seed in range(8)))
        for seed, reader in enumerate(readers):
            assert reader.tokens == [expected_tokens(seed, index, 30) for index in range(2)]
        assert engine.rank_pids == [pids]
    assert not any(map(is_running, pids))
    assert lost_in(engine) == []
    verified(engine)


async def test_the_shared_folder_goes_with_the_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("eventlm.system.shared_folder._MEMORY", tmp_path)
    async with running(parallel=T2S2) as engine:
        [first] = os.listdir(tmp_path)
        os.kill(engine.rank_pids[0][3], signal.SIGKILL)
        await until(lambda: os.listdir(tmp_path) not in ([first], []))
        assert len(os.listdir(tmp_path)) == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
async def test_any_rank_that_is_killed_is_named_and_its_peers_are_gone(tmp_path: Path, rank: int) -> None:
    async with running(record=tmp_path, parallel=T2S2, fake={"base_ns": 20_000_000}) as engine:
        told: list[bool] = []
        engine.on_state.append(lambda: told.append(engine.has_worker))
        readers = [Reader(handle) for handle in await engine.submit([request(20, seed=seed) for seed in range(4)])]
        await readers[0].until_tokens(5)
        [pids] = engine.rank_pids
        assert engine.has_worker
        begun = time.monotonic()
        os.kill(pids[rank], signal.SIGKILL)
        await until(lambda: not any(map(is_running, pids)))
        assert time.monotonic() - begun < 2
        for seed, reader in enumerate(readers):
            assert (await reader.done()).tokens == [expected_tokens(seed, 0, 20)]
        # What /health says.
        assert told == [False, True]
    [lost] = lost_in(engine)
    assert (lost.rank, lost.reason, lost.crashed) == (rank, "died (killed by SIGKILL)", False)
    steps = {event.step for event in recorded(engine) if isinstance(event, Launched) and event.epoch == 1}
    assert lost.step in steps | {-1}
    verified(engine)


async def test_a_stopped_rank_is_named_and_killed(tmp_path: Path) -> None:
    worker = WorkerConfig(heartbeat_timeout_seconds=4)
    async with running(record=tmp_path, parallel=T2S2, worker=worker) as engine:
        [pids] = engine.rank_pids
        os.kill(pids[1], signal.SIGSTOP)
        await until(lambda: not any(map(is_running, pids)))
        [reader] = await generate(engine, request(20))
        assert reader.tokens == [expected_tokens(5, 0, 20)]
    assert [(lost.rank, lost.reason) for lost in lost_in(engine)] == [(1, "no heartbeat for 4 s")]
    verified(engine)


@pytest.mark.parametrize(
    ("fake", "reason", "crashed"),
    [
        ({"die_ppm": 100_000}, "died (exit code 1)", False),
        ({"raise_ppm": 100_000}, "failed: drawn to raise in step {step}", True),
        ({"hang_ppm": 150_000}, "one step took longer than 1 s", False),
    ],
)
async def test_the_rank_that_fails_is_the_reason_whatever_its_peers_notice(
    tmp_path: Path, fake: dict[str, Any], reason: str, crashed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "RESTART_SECONDS", 0)
    worker = WorkerConfig(step_timeout_seconds=1, max_losses=0)
    async with running(record=tmp_path, parallel=T2S2, worker=worker, fake=fake) as engine:
        readers = await generate(engine, *(request(6, seed=seed) for seed in range(3)))
        assert [reader.tokens[0] for reader in readers] == [expected_tokens(seed, 0, 6) for seed in range(3)]
    found = lost_in(engine)
    assert found
    [name] = [key.removesuffix("_ppm") for key in fake]
    for lost in found:
        assert lost.step >= 0
        assert lost.rank == struck_rank(name, lost.epoch, 0, lost.step)
        assert (lost.reason, lost.crashed) == (reason.format(step=lost.step), crashed)
    verified(engine)


def struck_rank(name: str, *where: int) -> int:
    """Which rank the fake replica's fault begins with."""
    from eventlm.worker.fake.tokens import draw

    return draw("rank", name, *where) % LAYOUT.num_ranks


async def suffer(folder: Path, num_deaths: int, parallel: ParallelConfig = T2S2) -> None:
    """Lose so many workers under load, by signals to a rank drawn at random and by faults of the fake model."""
    rng = random.Random(7)
    worker = WorkerConfig(step_timeout_seconds=1, heartbeat_timeout_seconds=SILENCE_SECONDS, max_losses=0)
    fake = {"base_ns": 10_000_000, "raise_ppm": 10_000, "hang_ppm": 5_000, "die_ppm": 5_000}
    #: By epoch, the rank that was sent a signal.
    struck: dict[int, tuple[int, int]] = {}
    num_done = 0

    async def load(client: int) -> None:
        nonlocal num_done
        for turn in itertools.count():
            if len(struck) >= num_deaths:
                return
            seed = 10_000 * client + turn
            [reader] = await generate(engine, request(30, seed=seed))
            assert reader.tokens == [expected_tokens(seed, 0, 30)]
            num_done += 1

    async with running(record=folder, parallel=parallel, worker=worker, fake=fake) as engine:
        told: list[bool] = []
        engine.on_state.append(lambda: told.append(engine.has_worker))
        clients = [asyncio.create_task(load(client)) for client in range(4)]
        while len(struck) < num_deaths and not any(client.done() for client in clients):
            await asyncio.sleep(rng.random() / 2)
            [pids] = engine.rank_pids
            if not engine.has_worker or len(pids) != LAYOUT.num_ranks:
                continue
            rank, number = rng.randrange(4), rng.choice([signal.SIGKILL] * 4 + [signal.SIGSTOP])
            begun = time.monotonic()
            try:
                os.kill(pids[rank], number)
            except ProcessLookupError:
                # A fault has ended it just now.
                continue
            struck[engine._replicas._all[0]._epoch] = (rank, number)
            await until(lambda pids=pids: not any(map(is_running, pids)))
            took = time.monotonic() - begun
            assert took < 2 + (SILENCE_SECONDS + 1 if number == signal.SIGSTOP else 0)
        await asyncio.gather(*clients)
        # Each loss and each return.
        assert told == [False, True] * (len(told) // 2) + [False] * (len(told) % 2)
    found = lost_in(engine)
    assert len(found) >= num_deaths
    for lost in found:
        name = FAULTS.get(lost.reason.removesuffix(f" {lost.step}"))
        if name is not None:
            assert lost.rank == struck_rank(name, lost.epoch, 0, lost.step)
        else:
            rank, number = struck[lost.epoch]
            assert (lost.rank, lost.reason) == (rank, SIGNALS[number])
    assert num_done > num_deaths // 4
    verified(engine)


SILENCE_SECONDS = 4
SIGNALS = {
    signal.SIGKILL: "died (killed by SIGKILL)",
    signal.SIGSTOP: f"no heartbeat for {SILENCE_SECONDS} s",
}
FAULTS = {
    "died (exit code 1)": "die",
    "failed: drawn to raise in step": "raise",
    "one step took longer than 1 s": "hang",
}


async def test_deaths_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "RESTART_SECONDS", 0)
    await suffer(tmp_path, 6)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("parallel", "num_deaths"), [(T2S2, 500), (T4, 100)])
async def test_hundreds_of_deaths_under_load(tmp_path: Path, parallel: ParallelConfig, num_deaths: int) -> None:
    await suffer(tmp_path, num_deaths, parallel)


def test_tokens_go_to_the_stages_that_do_not_sample() -> None:
    group = scripted([[], [], [], []])
    sent: list[list[Any]] = [[] for _ in range(4)]
    for worker, frames in zip(group._workers, sent, strict=True):
        worker.send_frames = lambda *each, frames=frames: frames.append(each)  # type: ignore[method-assign]
    group.note_result(StepResult(epoch=1, step=7, start_ns=0, end_ns=1, tokens=[[5], []]))
    body = encode_body(launched(8, decodes=[(1, 0, 3, 0)]))
    group.send_step(body, payload(new_sequence(1, [1, 2])))
    group.send_step(body, payload())
    from eventlm.worker.protocol import decode_to_worker

    told = [[decode_to_worker(beside) for _, beside in frames] for frames in sent]
    assert all(frames[0][0] is body for frames in sent)
    first = payload(new_sequence(1, [1, 2]))
    assert told[2] == told[3] == [first, payload()]
    assert told[0] == told[1] == [structs.replace(first, results=[(7, [[5], []])]), payload()]


@pytest.mark.parametrize(("device", "expected"), [("cpu", [2]), ("cuda:0", [2, 3])])
def test_a_grammar_is_there_when_all_ranks_that_draw_have_it(device: str, expected: list[int]) -> None:
    group = scripted([[], [], [], []])
    group._setups = [structs.replace(each, device=device) for each in SETUPS]
    asked: list[tuple[int, PrepareGrammar]] = []
    for rank, worker in enumerate(group._workers):
        worker.send = lambda message, rank=rank: asked.append((rank, message))  # type: ignore[method-assign]
    messages = [PrepareGrammar(key=key, grammar="g") for key in range(2)]
    for message in messages:
        group.prepare_grammar(message)
    assert asked == [(rank, message) for message in messages for rank in expected]
    *first, last = expected
    assert [group.note_built(rank, GrammarBuilt(epoch=1, key=0)) for rank in first] == [False] * len(first)
    assert group.note_built(last, GrammarBuilt(epoch=1, key=0))
    # One rank that cannot build it is enough, and is reported once.
    told = [group.note_built(rank, GrammarBuilt(epoch=1, key=1, error="no such rule")) for rank in expected]
    assert told == [True] + [False] * len(first)


class ScriptedRank(WorkerProcess):
    """Says so many things, each after so many seconds; then it is dead, silent or goes on beating."""

    def __init__(self, words: Sequence[tuple[float, FromWorker | None]], *, beats: bool = True) -> None:
        super().__init__(real_system(), SETUPS[0])
        self._words = list(words)
        self._beats = beats
        self._due: float | None = None

    @property
    def ending(self) -> str:
        return "died (killed by SIGKILL)" if not self._words and self._died else ""

    _died = False
    is_end_of_all = False

    async def receive(self, timeout_seconds: float) -> FromWorker | None:
        loop = asyncio.get_running_loop()
        if self._words:
            seconds, message = self._words[0]
            self._due = self._due or loop.time() + seconds
            if self._due - loop.time() > timeout_seconds:
                await asyncio.sleep(timeout_seconds)
                raise TimeoutError
            await asyncio.sleep(max(self._due - loop.time(), 0))
            self._words.pop(0)
            self._due = None
            self._died = message is None
            return message
        await asyncio.sleep(timeout_seconds)
        if self._beats:
            return Heartbeat(epoch=1)
        raise TimeoutError

    async def kill(self) -> None:
        pass


SETUPS = [structs.replace(each, heartbeat_ns=50_000_000) for each in worker_setups(fake_setup(parallel=T2S2))]
NOTICED = WorkerFailed(epoch=1, message="a connection was closed", lost_peer=True, step=4)


def scripted(words: Sequence[Sequence[tuple[float, FromWorker | None]]], *, silent: Sequence[int] = ()) -> RankGroup:
    """A group whose ranks say these things."""
    group = RankGroup(real_system(), SETUPS, ProcessLauncher(), silence_seconds=20)
    group._workers = [ScriptedRank(own, beats=rank not in silent) for rank, own in enumerate(words)]
    return group


def take(rank: int, message: FromWorker) -> Loss | None:
    """As a controller does, of the messages above."""
    if isinstance(message, WorkerFailed):
        return Loss(message.message, noticed=GRACE_SECONDS if message.lost_peer else 0.0, step=message.step)
    if isinstance(message, WorkerDesync):
        return Loss(message.detail, desynced=message.step, step=message.step)
    return None


FAILED = WorkerFailed(epoch=1, message="no more memory", step=3)


@pytest.mark.parametrize(
    ("words", "silent", "expected"),
    [
        # The rank that failed speaks after those that noticed.
        ([[(0.01, NOTICED)], [(0.02, NOTICED)], [(0.1, FAILED)], []], [], (2, "no more memory", 3)),
        # A death is noticed later than what it does to others.
        ([[(0.01, NOTICED)], [], [], [(0.15, None)]], [], (3, "died (killed by SIGKILL)", -1)),
        # Nobody else says anything.
        ([[], [(0.01, NOTICED)], [(0.02, NOTICED)], []], [], (1, "a connection was closed", 4)),
        # The one that says nothing at all.
        ([[], [(0.2, NOTICED)], [], []], [3], (3, "no heartbeat for 20 s", -1)),
        # Of two that failed, the first.
        ([[(0.05, FAILED)], [(0.15, WorkerDesync(epoch=1, step=2, detail="they differ"))], [], []], [], (0, None, 3)),
    ],
)
async def test_the_first_cause_wins(
    words: Sequence[Sequence[tuple[float, FromWorker | None]]], silent: list[int], expected: tuple[int, str, int]
) -> None:
    loss = await asyncio.wait_for(scripted(words, silent=silent).listen(take), PATIENCE_SECONDS)
    rank, reason, step = expected
    assert (loss.rank, loss.step) == (rank, step)
    assert reason is None or loss.reason == reason


async def test_of_what_ends_all_ranks_none_is_the_cause() -> None:
    group = scripted([[], [(0.01, NOTICED)], [(0.05, None)], [(0.05, None)]])
    for worker in group._workers[2:]:
        worker.is_end_of_all = True  # type: ignore[misc]
    loss = await asyncio.wait_for(group.listen(take), PATIENCE_SECONDS)
    assert (loss.rank, loss.step, loss.reason) == (-1, -1, "died (killed by SIGKILL)")


READY = WorkerReady(epoch=1, pid=1, num_blocks=64, model_fingerprint="m")


async def test_all_are_ready_with_the_fewest_blocks_of_any() -> None:
    words = [[(0.0, structs.replace(READY, pid=rank, num_blocks=64 - rank))] for rank in range(4)]
    message, _ = await scripted(words).ready(PATIENCE_SECONDS)
    assert isinstance(message, WorkerReady)
    # The report is that of the answering rank.
    assert (message.num_blocks, message.pid) == (61, 2)


async def test_a_start_fails_by_the_rank_that_cannot() -> None:
    words: list[list[tuple[float, FromWorker | None]]] = [[(0.0, READY)], [(0.01, NOTICED)], [(0.1, FAILED)], []]
    assert await scripted(words).ready(PATIENCE_SECONDS) == (FAILED, 2)
    words[2] = [(0.0, READY)]
    assert await scripted(words).ready(PATIENCE_SECONDS) == (NOTICED, 1)


async def test_stages_have_their_times(tmp_path: Path) -> None:
    async with running(record=tmp_path, parallel=T2S2, fake={"base_ns": 4_000_000}) as engine:
        await generate(engine, request(4))
    results = [event for event in recorded(engine) if isinstance(event, StepCompleted)]
    assert results
    for event in results:
        [first, second] = event.stages
        assert event.start_ns == first[0] < first[1] <= second[0] < second[1] == event.end_ns
        assert first[1] - first[0] == second[1] - second[0] == 2_000_000
