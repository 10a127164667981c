"""Bugs that are planted in the shell, one at a time, to show that the invariants of a world find them.

`python -m tests.world.planted` tries seeds from 0 on for each bug, and writes to `RESULTS.md` which seed finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

from msgspec import structs

from eventlm.bus.log_writer import LogWriter
from eventlm.bus.recorder import Effect, ThreadedRecorder
from eventlm.bus.segment_file import SegmentFile
from eventlm.bus.subscription import LiveBuffer
from eventlm.core.state.block_pool import BlockPool
from eventlm.engine.backend import AttemptId, BackendError
from eventlm.engine.backends.answers import Answer, Answers
from eventlm.engine.clock import AsyncioClock
from eventlm.engine.core_loop import CoreLoop
from eventlm.engine.engine_core import EngineCore
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.live_requests import Output
from eventlm.engine.replicas.controller import ReplicaController
from eventlm.engine.replicas.rank_group import Loss
from eventlm.engine.replicas.worker_process import WorkerProcess
from eventlm.engine.request import IdempotencyKey, UnknownReplyError
from eventlm.engine.request_registry import Reply, RequestRegistry
from eventlm.events import Event, Forwarded, ForwardFailed
from eventlm.launchers.process import LocalRanks
from eventlm.worker.protocol import FromWorker, StepResult
from tests.world.plans.plan import draw_gateway_plan
from tests.world.planted_bug import Planted
from tests.world.planted_recovery import IN_RECOVERY
from tests.world.swarm.results import PAGE

#: A bug must be found within this many seeds.
NUM_SEEDS = 200
_BEGIN, _END = "<!-- planted: written by tests.world.planted -->", "<!-- end of planted -->"


def _effect_before_write() -> contextlib.AbstractContextManager[Any]:
    write = ThreadedRecorder.write

    def write_later(self: ThreadedRecorder, bodies: list[bytes], then: Effect, **beside: Sequence[bytes]) -> None:
        if self.writer.num_events:
            then()
            write(self, bodies, lambda: None, **beside)
        else:
            write(self, bodies, then, **beside)

    return patch.object(ThreadedRecorder, "write", write_later)


@contextlib.contextmanager
def _old_epoch() -> Iterator[None]:
    take = ReplicaController._take
    last: dict[int, StepResult] = {}

    def take_late(self: ReplicaController, rank: int, message: FromWorker) -> Loss | None:
        if isinstance(message, StepResult):
            before, last[id(self)] = last.get(id(self)), message
            if before is not None and before.epoch < message.epoch:
                message = structs.replace(before, epoch=message.epoch, step=message.step)
        return take(self, rank, message)

    with patch.object(ReplicaController, "_take", take_late):
        yield


@contextlib.contextmanager
def _leaked_block() -> Iterator[None]:
    release = BlockPool.release
    num_calls = 0

    def release_most(self: BlockPool, blocks: list[int]) -> None:
        nonlocal num_calls
        num_calls += 1
        release(self, blocks[1:] if num_calls % 10 == 0 else blocks)

    with patch.object(BlockPool, "release", release_most):
        yield


def _unarmed_deadline() -> contextlib.AbstractContextManager[Any]:
    arm = CoreLoop._arm_timer

    def arm_unless_paused(self: CoreLoop) -> None:
        arm(self)
        if self.core.state.paused and self._cancel_timer is not None:
            # The timer still counts as armed.
            self._cancel_timer()

    return patch.object(CoreLoop, "_arm_timer", arm_unless_paused)


def _lost_text_end() -> contextlib.AbstractContextManager[Any]:
    end_text = EngineCore.end_text

    def end_some(self: EngineCore, request: int, index: int, position: int, reason: str) -> None:
        if not reason or request % 2:
            end_text(self, request, index, position, reason)

    return patch.object(EngineCore, "end_text", end_some)


def _dropped_cancel() -> contextlib.AbstractContextManager[Any]:
    cancel = InferenceEngine.cancel

    def cancel_some(self: InferenceEngine, request: int, *reason: str) -> None:
        if request % 2:
            cancel(self, request, *reason)

    return patch.object(InferenceEngine, "cancel", cancel_some)


def _two_ends() -> contextlib.AbstractContextManager[Any]:
    deliver = EngineCore._deliver_output

    def deliver_twice(self: EngineCore, output: Output) -> None:
        deliver(self, output)
        if output.ended is not None and output.ended.request % 3 == 0:
            deliver(self, output)

    return patch.object(EngineCore, "_deliver_output", deliver_twice)


def _unbounded_subscriber() -> contextlib.AbstractContextManager[Any]:
    def offer(self: LiveBuffer, events: Sequence[Event]) -> None:
        self._items.extend(events)
        self.wake()

    return patch.object(LiveBuffer, "offer", offer)


@contextlib.contextmanager
def _retry_from_the_start() -> Iterator[None]:
    begin, fail = Answers.begin, Answers.fail

    def begin_anew(self: Answers, forwarded: Forwarded) -> Answer:
        answer = begin(self, forwarded)
        return Answer(answer.request, answer.seed, answer.prompt_tokens)

    def fail_softly(self: Answers, name: AttemptId, error: BackendError, *, can_continue: bool) -> ForwardFailed:
        return fail(self, name, error, can_continue=True)

    with patch.multiple(Answers, begin=begin_anew, fail=fail_softly):
        yield


def _lost_front_end() -> contextlib.AbstractContextManager[Any]:
    lose = InferenceEngine.lose_front_end

    def lose_all(self: InferenceEngine, front_end: int) -> None:
        for request in self._require_engine_core().core.state.requests:
            self.cancel(request)
        lose(self, front_end)

    return patch.object(InferenceEngine, "lose_front_end", lose_all)


def _untold_full_disk() -> contextlib.AbstractContextManager[Any]:
    fail = LogWriter._fail

    def fail_silently(self: LogWriter, error: OSError) -> None:
        on_problem, self._on_problem = self._on_problem, None
        fail(self, error)
        self._on_problem = on_problem

    return patch.object(LogWriter, "_fail", fail_silently)


def _clock_of_the_wall() -> contextlib.AbstractContextManager[Any]:
    def now_ns(self: AsyncioClock) -> int:
        clock = self._clock
        if "unix_ns" not in self.__dict__:
            self.__dict__["unix_ns"] = clock.unix_ns() - (clock.monotonic_ns() - self.origin_ns)
        return clock.unix_ns() - int(self.__dict__["unix_ns"])

    return patch.object(AsyncioClock, "now_ns", now_ns)


def _on_submit(act: Callable[[], object]) -> contextlib.AbstractContextManager[Any]:
    submit = InferenceEngine.submit

    async def submit_and_act(self: InferenceEngine, *arguments: Any, **options: Any) -> Any:
        act()
        return await submit(self, *arguments, **options)

    return patch.object(InferenceEngine, "submit", submit_and_act)


@contextlib.contextmanager
def _leaked_task() -> Iterator[None]:
    tasks = []
    with _on_submit(lambda: tasks.append(asyncio.create_task(asyncio.sleep(1e6)))):
        yield


def _leaked_timer() -> contextlib.AbstractContextManager[Any]:
    return _on_submit(lambda: asyncio.get_running_loop().call_later(1e6, print))


def _leaked_file() -> contextlib.AbstractContextManager[Any]:
    return patch.object(SegmentFile, "close", lambda self: None)


def _no_sync() -> contextlib.AbstractContextManager[Any]:
    def sync(self: SegmentFile) -> None:
        self._synced = self.written

    return patch.object(SegmentFile, "sync", sync)


@contextlib.contextmanager
def _no_sync_of_names() -> Iterator[None]:
    with (
        patch.object(LogWriter, "_sync_names", lambda self: None),
        patch("eventlm.bus.log_writer.sync_path", lambda disk, folder: None),
    ):
        yield


def _repeated_sync() -> contextlib.AbstractContextManager[Any]:
    sync = SegmentFile.sync

    def sync_again(self: SegmentFile) -> OSError | None:
        if not self.is_synced:
            with contextlib.suppress(OSError):
                self._file.sync()
        return sync(self)

    return patch.object(SegmentFile, "sync", sync_again)


def _leaked_thread() -> contextlib.AbstractContextManager[Any]:
    make = ThreadedRecorder.__init__

    def make_two(self: ThreadedRecorder, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        make(self, *arguments, **options)

    return patch.object(ThreadedRecorder, "__init__", make_two)


def _leaked_child() -> contextlib.AbstractContextManager[Any]:
    kill = WorkerProcess.kill

    async def kill_the_dead(self: WorkerProcess) -> None:
        if self.ending:
            await kill(self)

    return patch.object(WorkerProcess, "kill", kill_the_dead)


def _missing_restart() -> contextlib.AbstractContextManager[Any]:
    async def wait(self: ReplicaController) -> bool:
        await asyncio.Event().wait()
        return False

    return patch.object(ReplicaController, "_restart", wait)


def _leaked_folder() -> contextlib.AbstractContextManager[Any]:
    return patch.object(LocalRanks, "release", lambda self: None)


def _run_twice() -> contextlib.AbstractContextManager[Any]:
    def find_nothing(self: RequestRegistry, key: IdempotencyKey, owner: str) -> Reply:
        raise UnknownReplyError("no reply has the key")

    return patch.multiple(RequestRegistry, find_by_key=find_nothing, check_key=lambda self, submission: None)


_SYNCED = ("a reboot leaves what was synced", "a run that has ended outlives a reboot")
_TIMES = "times of the log are the host's"
PLANTED = {
    "effect before its write": Planted(
        "What clients may see leaves before its events are written.",
        ("nothing shown that the log lacks", "no end shown that the log lacks"),
        _effect_before_write,
    ),
    "old epoch": Planted(
        "The result of a worker that was given up counts as its successor's.",
        ("results are of what was launched", "workers answer what was launched"),
        _old_epoch,
    ),
    "missing restart": Planted("No worker follows one that is lost.", ("somebody is served",), _missing_restart),
    "leaked block": Planted(
        "One table in ten keeps a block when it is released.",
        ("no block is left", "no defect is logged", "the engine lives"),
        _leaked_block,
    ),
    "deadline not armed": Planted(
        "A pause takes the timer back, and it is not armed again for the same deadline.",
        ("late requests are dropped",),
        _unarmed_deadline,
    ),
    "lost text end": Planted(
        "The engine does not hear of some stop strings that an edge has found.",
        ("texts end for the right reason", "edges end texts"),
        _lost_text_end,
    ),
    "dropped cancel": Planted(
        "Some requests go on when their clients have left.", ("requests end with their clients",), _dropped_cancel
    ),
    "two ends": Planted(
        "The end of a reply is delivered twice.",
        # In a request with two choices, the edge takes the second end for that of the other choice.
        ("one finish a choice", "texts are cut for a reason", "requests end with their clients", "edges end texts"),
        _two_ends,
    ),
    "unbounded subscriber": Planted(
        "The queue of a subscriber takes all events.", ("queues of subscribers are bounded",), _unbounded_subscriber
    ),
    "retry after tokens": Planted(
        "A request is sent to another backend as it came, though some of its answer was shown.",
        ("cut texts begin the reference's", "whole texts are the reference's"),
        _retry_from_the_start,
        draw_gateway_plan,
    ),
    "front end's loss": Planted(
        "The loss of a front end ends the requests of the others, too.",
        ("no request ends because of another",),
        _lost_front_end,
    ),
    "untold full disk": Planted(
        "Nobody is told that events are lost.",
        ("gaps are reported", "nothing shown that the log lacks", "no end shown that the log lacks"),
        _untold_full_disk,
    ),
    "fsync left out": Planted("No file of a log is synced.", _SYNCED, _no_sync),
    "folder not synced": Planted("Files of a log are synced, but not their names.", _SYNCED, _no_sync_of_names),
    "failed fsync repeated": Planted(
        "A sync that has failed is tried again, which the kernel lets succeed.", _SYNCED, _repeated_sync
    ),
    "leaked task": Planted("A task is forgotten with each request.", ("no task is left",), _leaked_task),
    "leaked timer": Planted("A timer is forgotten with each request.", ("no timer is left",), _leaked_timer),
    "leaked file": Planted("No segment is closed.", ("no file is left open",), _leaked_file),
    "leaked thread": Planted("A log is given two threads.", ("no thread is left",), _leaked_thread),
    "leaked child": Planted(
        "A worker that counts as lost is not ended.", ("no child is left", "no task is left"), _leaked_child
    ),
    "leaked folder": Planted(
        "What the ranks of a replica share is not removed.", ("no shared folder is left",), _leaked_folder
    ),
    "resubmission run twice": Planted(
        "A request that is sent again with its idempotency key runs again.", ("one execution a key",), _run_twice
    ),
    "clock that jumps back": Planted(
        "The run's clock follows the wall clock.", (_TIMES, "late requests are dropped"), _clock_of_the_wall
    ),
} | IN_RECOVERY


def first_found(name: str) -> tuple[int, str]:
    """The first seed that finds a bug, and the invariant that does. Raises LookupError if none does."""
    for seed in range(NUM_SEEDS):
        if found := PLANTED[name].find(seed):
            return seed, found
    raise LookupError(f"{NUM_SEEDS} seeds do not find {name!r}: {PLANTED[name].what}")


def main() -> int:
    """Exit status 1: a bug was not found, or not by an invariant that is about it."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], stdout=subprocess.PIPE, text=True, check=True)
    rows = []
    for name, planted in PLANTED.items():
        seed, found = first_found(name)
        rows.append(f"| {name} | {seed} | {found} |")
        print(rows[-1], flush=True)
        if found not in planted.found_by:
            print(f"it is not about this bug; these are: {', '.join(planted.found_by)}", file=sys.stderr)
            return 1
    text = PAGE.read_text()
    table = f"At commit {commit.stdout.strip()}:\n\n| bug | seed | found by |\n|---|---:|---|\n" + "\n".join(rows)
    PAGE.write_text(f"{text.split(_BEGIN)[0]}{_BEGIN}\n\n{table}\n\n{_END}{text.split(_END)[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
