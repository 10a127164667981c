"""The worker's loop in this process: what it begins, does meanwhile and says at its end."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zmq

from eventlm.events import Launched
from eventlm.events.codec import encode_body
from eventlm.worker.fake.model import FakeModel
from eventlm.worker.process import BETWEEN_MS, Worker
from eventlm.worker.protocol import (
    Shutdown,
    StepOutput,
    StepPayload,
    StepResult,
    WorkerSetup,
    decode_from_worker,
    encode,
)
from tests.processes import PATIENCE_SECONDS
from tests.worker.launches import launched, new_sequence, payload

SETUP = WorkerSetup(
    replica=0,
    epoch=1,
    model="fake",
    block_size=16,
    num_blocks=64,
    max_model_len=512,
    max_num_batched_tokens=512,
    max_num_seqs=8,
    fake={"base_ns": 300, "decode_ns": 0, "prefill_token_ns": 0, "context_token_ns": 0},
)


def test_it_does_not_end_before_its_last_words_are_sent(tmp_path: Path) -> None:
    worker = Worker(f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out", os.getppid())
    engine = zmq.Context().socket(zmq.PUSH)
    engine.connect(f"ipc://{tmp_path}/in")
    engine.send(encode(SETUP))
    engine.send_multipart([encode_body(launched(0, decodes=[(4, 1, 7, 0)])), encode(payload())])
    # Nobody listens: they are kept for a second, not only for as long as the process happens to need for its end.
    begun = time.monotonic()
    assert worker.run() == 1
    assert worker._context.closed
    assert time.monotonic() - begun > 0.9
    engine.context.destroy(linger=0)


class Busy(FakeModel):
    """Has five pieces of work to do ahead; `endless` is never done. A message comes behind the fifth."""

    def __init__(self, engine: zmq.Socket[bytes], *, endless: bool) -> None:
        self.num_pieces = 0
        self._engine, self._endless = engine, endless

    def work_ahead(self) -> bool:
        self.num_pieces += 1
        if self.num_pieces == 5:
            self._engine.send(b"second")
        return self._endless or self.num_pieces < 5


@pytest.mark.parametrize("endless", [False, True])
def test_a_worker_that_waits_works_ahead_until_a_message_comes(tmp_path: Path, endless: bool) -> None:
    worker = Worker(f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out", os.getpid())
    engine = zmq.Context().socket(zmq.PUSH)
    engine.connect(f"ipc://{tmp_path}/in")
    runner = Busy(engine, endless=endless)
    # It does not begin while messages come.
    engine.send(b"first")
    assert worker._inbox.poll(1000 * PATIENCE_SECONDS)
    assert worker._receive(runner) == [b"first"]
    assert runner.num_pieces == 0
    begun = time.monotonic()
    assert worker._receive(runner) == [b"second"]
    # It looks for a message between two pieces, and has a rest.
    assert time.monotonic() - begun >= 0.9e-3 * BETWEEN_MS * (runner.num_pieces - 1)
    assert runner.num_pieces >= 5 if endless else runner.num_pieces == 5
    engine.context.destroy(linger=0)
    worker._context.destroy(linger=0)


def test_a_step_that_comes_while_one_is_under_way_begins_when_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is the fake device's: no time goes by here but by the test's hand."""
    now_ns = 7
    monkeypatch.setattr("eventlm.worker.fake.model.time.monotonic_ns", lambda: now_ns)
    model = FakeModel(SETUP)
    new = payload(new_sequence(1, [1, 2]))
    first = model.start(launched(0, chunks=[(1, 0, 0, 2, 1)], blocks=[(0, 0, [5])]), new)
    now_ns = 100
    second = model.start(launched(1, decodes=[(1, 0, 2, 1)]), payload())
    assert (first.times_ns, second.times_ns) == ((7, 307), (307, 607))
    assert not first.is_done()
    now_ns = 307
    assert first.is_done()
    assert not second.is_done()
    now_ns = 1000
    third = model.start(launched(2, decodes=[(1, 0, 2, 2)]), payload())
    assert second.is_done()
    assert third.times_ns == (1000, 1300)


class Gated(FakeModel):
    """Its first step is done when the second has begun."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def start(self, launch: Launched, payload: StepPayload) -> Any:
        self.begun.append(launch.step)
        return GatedStep(launch.step, self.begun)


class GatedStep(NamedTuple):
    """Of a `Gated`."""

    number: int
    begun: list[int]

    def is_done(self) -> bool:
        return len(self.begun) == 2

    def finish(self) -> StepOutput:
        return StepOutput([[self.number]], [], [], {})

    @property
    def times_ns(self) -> tuple[int, int]:
        return (0, 1)


def test_a_worker_begins_a_step_while_one_is_under_way(tmp_path: Path) -> None:
    worker = Worker(f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out", os.getpid())
    context = zmq.Context()
    engine, results = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    results.bind(f"ipc://{tmp_path}/out")
    engine.connect(f"ipc://{tmp_path}/in")
    for step in range(2):
        engine.send_multipart([encode_body(launched(step)), encode(payload())])
    serving = threading.Thread(target=worker._serve, args=(3, Gated()), daemon=True)
    serving.start()
    answers = []
    for _ in range(2):
        assert results.poll(1000 * PATIENCE_SECONDS), "the second step was not begun"
        answers.append(decode_from_worker(results.recv()))
    assert [answer.tokens for answer in answers if isinstance(answer, StepResult)] == [[[0]], [[1]]]
    engine.send(encode(Shutdown()))
    serving.join()
    context.destroy(linger=0)
    worker._context.destroy(linger=0)
