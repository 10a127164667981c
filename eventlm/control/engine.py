"""InferenceEngine: the public API of the engine. Owns the bus, the log and the replicas.

Everything asynchronous ends in a pending fact; one drain for each tick of the loop applies what is pending. Loop
timers only wake the drain: due timers are the core's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import structlog
from msgspec import structs

from eventlm.bus.bus import Bus
from eventlm.bus.log_reader import read_history
from eventlm.bus.log_writer import LogWriteError, LogWriter
from eventlm.bus.recorder import Recorder
from eventlm.config.sizes import memory_bytes
from eventlm.config.state_folder import runs_folder
from eventlm.control.admin import Abort, AdminAction, Drain, EngineStatus, Resume, facts_of, status_of
from eventlm.control.block_names import BlockNames
from eventlm.control.driver import Driver
from eventlm.control.ended_rows import EndedRows
from eventlm.control.explanations import ExplainAnswer, Explanations, NotExplainedError
from eventlm.control.grammar_builds import GrammarBuilds
from eventlm.control.live_requests import LiveRequests
from eventlm.control.metering import charge_for, metered
from eventlm.control.metrics import MetricsStore
from eventlm.control.metrics_aggregates import Histogram
from eventlm.control.metrics_components import SCHEDULING_BUCKETS_NS, EngineMetrics, RecorderMetrics, TimedCore
from eventlm.control.predictor_source import PredictorSource
from eventlm.control.rate_limits import RateLimiter
from eventlm.control.recording import make_recorder, make_writer
from eventlm.control.replica import ReplicaController
from eventlm.control.reply_status import ReplyStatus, reply_status
from eventlm.control.request import (
    ContextLengthError,
    EngineRequest,
    EngineUnavailableError,
    OnOutput,
    QueueFullError,
    RequestHandle,
    ResumedReply,
    Submission,
)
from eventlm.control.request_check import check_request
from eventlm.control.request_registry import Reply, RequestRegistry
from eventlm.control.setup import EngineSetup, make_header, make_run_id, worker_setups
from eventlm.core.predictor import Predictor
from eventlm.errors import EventLMError
from eventlm.events import Cancelled, Event, Fact, FrontEndLost, Launched, TimerDue
from eventlm.events.decisions import RejectReason
from eventlm.grammars import GrammarError
from eventlm.worker.protocol import PrepareGrammar, StepPayload, StepResult, WorkerReady

EngineState = Literal["loading", "ready", "draining", "dead"]

#: After so long a request whose grammar is not built ends with an error.
GRAMMAR_SECONDS = 60.0

log = structlog.get_logger("eventlm.engine")


class InferenceEngine:
    """Serves one model on one or more replicas. Use within one event loop: `start`, `submit`, `stop`."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        #: Called behind each change of the state.
        self.on_state: Callable[[], None] | None = None
        self._state: EngineState = "loading"
        self.max_model_len = setup.core.max_model_len
        self.model_names = list(setup.core.models)
        self.run_folder: Path | None = None
        self._origin_ns = time.monotonic_ns()
        #: Of the digests of steps; only the side-car has it too.
        self._digest_key = secrets.token_bytes(32)
        self._driver: Driver | None = None
        #: Submitters who do not know yet whether their group is admitted.
        self._undecided: list[asyncio.Future[RejectReason | None]] = []
        self._recorder: Recorder | None = None
        self._rows = EndedRows()
        self._metrics = MetricsStore(sink=self._rows)
        self._scheduling_time = Histogram.over(SCHEDULING_BUCKETS_NS)
        self._loop: asyncio.AbstractEventLoop | None = None
        #: The core failed: nothing more can be said of its state, nor be written.
        self._broken = False
        #: Why it died, for everybody who asks later.
        self._death: EngineUnavailableError | None = None
        self._drain_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self.registry = self._make_registry()
        self._limiter = RateLimiter()
        self._explanations = Explanations()
        #: Grammars of live requests; the replicas tell it of their workers.
        self.grammars = GrammarBuilds(self._send_grammar, self._grammar_ready)
        self._live_replicas = setup.core.num_replicas
        self._replicas = [
            ReplicaController(worker, setup.config.worker, self, self._replica_dead) for worker in worker_setups(setup)
        ]

    @property
    def state(self) -> EngineState:
        """Only a ready engine takes requests."""
        return self._state

    @state.setter
    def state(self, state: EngineState) -> None:
        self._state = state
        if self.on_state is not None:
            self.on_state()

    def now_ns(self) -> int:
        """Nanoseconds since the run started."""
        return time.monotonic_ns() - self._origin_ns

    @property
    def origin_ns(self) -> int:
        """Where the run's clock stands at 0, on this host's monotonic one."""
        return self._origin_ns

    @property
    def bus(self) -> Bus:
        """Every event of the run. There is none before `start`."""
        return self._require_driver().bus

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, by replica; 0 where there is none at the moment."""
        return [replica.worker_pid for replica in self._replicas]

    def metrics(self) -> EngineMetrics:
        """All figures of this moment; before `start` there are none of the log."""
        return EngineMetrics(
            log=self._metrics.snapshot(),
            state=self.state,
            scheduling_time=self._scheduling_time.copy(),
            recorder=self._recorder_metrics(),
        )

    async def read_metrics(self) -> EngineMetrics:
        """As `metrics`, for those to whom it may be far away."""
        return self.metrics()

    def _recorder_metrics(self) -> RecorderMetrics | None:
        recorder = self._recorder
        if recorder is None:
            return None
        return RecorderMetrics(
            num_bytes=recorder.writer.num_bytes,
            num_events_behind=max(self._metrics.next_s - recorder.writer.next_s, 0),
            is_writing=not recorder.problem,
        )

    async def start(self) -> None:
        """Start the workers, fit the predictor, open the log. Raises what keeps a worker from starting."""
        self._loop = asyncio.get_running_loop()
        run = make_run_id()
        folder = self.setup.config.record.folder
        try:
            if folder:
                LogWriter.check_folder(folder)
            predictor = PredictorSource(self.setup.config.scheduler, worker_setups(self.setup)[0])
            # All are alike: if anybody must measure, the first does.
            warm_ups = [predictor.must_measure and replica.index == 0 for replica in self._replicas]
            starts = [replica.start(warm_up=yes) for replica, yes in zip(self._replicas, warm_ups, strict=True)]
            ready = await asyncio.gather(*starts)
            if self.state != "loading":
                raise EngineUnavailableError("the engine was stopped while it started")
            self._driver = self._open_log(run, ready[0], predictor)
        except BaseException:
            self.state = "dead"
            await self._stop_workers()
            raise
        for replica in self._replicas:
            replica.run()
        self._drain()
        self.state = "ready"

    def _open_log(self, run: str, first: WorkerReady, predictor: PredictorSource) -> Driver:
        """Where nobody asked for a record, a disk that is full keeps the engine from recording, not from starting."""
        record = self.setup.config.record
        if record.folder:
            try:
                return self._make_driver(run, first, predictor, make_writer(record, run, self._digest_key))
            except LogWriteError as error:
                if Path(record.folder) != runs_folder() or record.record_tokens:
                    raise
                log.warning(f"not recording: {error} with --record DIR")
                self.run_folder = self._recorder = None
        return self._make_driver(run, first, predictor, None)

    def _make_driver(
        self, run: str, first: WorkerReady, predictor: PredictorSource, writer: LogWriter | None
    ) -> Driver:
        """The first thing it does is to write the header."""
        coefficients = predictor.coefficients(first.samples)
        seed = secrets.randbits(64)
        header = make_header(self.setup, run, seed, coefficients, predictor.origin, first)
        recorder = None
        if writer is not None:
            self.run_folder = writer.run_folder
            recorder = self._recorder = make_recorder(self.setup.config.record, writer, self._guarded)
        bus = Bus(history=self._history if writer is not None else None, on_broken=_report_broken)
        bus.attach(self._metrics.apply)
        try:
            return Driver(
                header,
                TimedCore(
                    self.setup.core,
                    self.setup.plugins,
                    Predictor.from_coefficients(coefficients),
                    self._scheduling_time,
                ),
                self._make_live(seed, header.block_table_size),
                bus=bus,
                ship=self._ship,
                recorder=recorder,
                rows=self._rows,
                checkpoint_events=self.setup.config.record.checkpoint_events,
                validate_every=self.setup.config.record.validate_every,
                grammars=self.grammars,
            )
        except BaseException:
            if recorder is not None:
                with contextlib.suppress(LogWriteError):
                    recorder.close()
            raise

    def _make_live(self, seed: int, block_table_size: int) -> LiveRequests:
        block_size = self.setup.core.block_size
        return LiveRequests(
            BlockNames(secrets.token_bytes(32), block_size=block_size, capacity=block_table_size),
            block_size=block_size,
            seed_key=seed.to_bytes(8, "little"),
            digest_key=self._digest_key,
        )

    def _make_registry(self) -> RequestRegistry:
        config = self.setup.config.server
        return RequestRegistry(
            keep_ns=config.resume_seconds * 1_000_000_000,
            max_bytes=memory_bytes(config.resume_memory),
            now_ns=self.now_ns,
            cancel=self.cancel,
            wake=self._expire_later,
        )

    def _expire_later(self, delay_ns: int) -> None:
        assert self._loop is not None
        self._loop.call_later(delay_ns / 1e9, self.registry.expire)

    async def submit(
        self,
        group: Sequence[EngineRequest],
        *,
        submission: Submission | None = None,
        on_output: OnOutput | None = None,
    ) -> list[RequestHandle]:
        """Admit a group as one; a handle for each request.

        With a `submission` the group can be found by its id in the `registry`. With `on_output` all outputs go there,
        in the engine's order, and the handles cannot be iterated over. Raises QueueFullError, EngineUnavailableError,
        RateLimitError for a submission over its limits, and what `check_request` finds. If the caller is cancelled
        while it waits, the requests are cancelled too.
        """
        if self.state != "ready":
            raise self._death or EngineUnavailableError(f"the engine is {self.state}")
        if not group:
            return []
        for request in group:
            check_request(request, max_model_len=self.max_model_len, vocab_size=self.setup.vocab_size)
        group = self._with_cache_rules(group, submission)
        driver, loop = self._require_driver(), asyncio.get_running_loop()
        handles = [
            RequestHandle(
                -1, request.n, self.end_text, self.cancel, put=on_output and functools.partial(on_output, place)
            )
            for place, request in enumerate(group)
        ]
        sinks = [handle.put for handle in handles]
        reply = Reply(submission, group, sinks) if submission is not None else None
        if reply is not None:
            sinks = self.registry.sinks(reply)
        charge = charge_for(self._limiter, submission, group, self.now_ns()) if submission is not None else None
        if charge is not None:
            sinks = metered(charge, group, sinks)
            handles[0].rate_limits = charge.state
        admitted: asyncio.Future[RejectReason | None] = loop.create_future()

        def on_admission(reason: RejectReason | None, seqs: list[int]) -> None:
            if reply is not None and reason is None:
                self.registry.add(reply, seqs)
            if charge is not None and reason is not None:
                charge.refund()
            for handle, seq, member in zip(handles, seqs, group, strict=True):
                handle.request = seq
                if member.waits_for_grammar and reason is None:
                    self._watch_grammar(seq)
                if admitted.cancelled() and reason is None:
                    self.cancel(seq, "client")
            if not admitted.done():
                admitted.set_result(reason)

        driver.submit(list(zip(group, sinks, strict=True)), on_admission)
        self._wake()
        self._undecided.append(admitted)
        try:
            reason = await admitted
        except asyncio.CancelledError:
            # The answer may have come just before.
            for handle in handles:
                handle.cancel()
            raise
        finally:
            self._undecided.remove(admitted)
        if reason == "queue_full":
            raise QueueFullError("the queue is full: no room for the request now, try again later")
        if reason is not None:
            raise ContextLengthError(f"a prompt and its max_tokens exceed the context of {self.max_model_len} tokens")
        return handles

    def _with_cache_rules(
        self, group: Sequence[EngineRequest], submission: Submission | None
    ) -> Sequence[EngineRequest]:
        """Whether the requests read the prefix cache, and whose part of it."""
        cache = self.setup.config.cache
        if not cache.prefix_cache:
            return [structs.replace(request, skip_cache_read=True) for request in group]
        if cache.isolate_prefix_cache == "key" and submission is not None:
            # An owner is hexadecimal, so that nobody's salt makes one look like another.
            return [
                structs.replace(request, cache_salt=f"{submission.owner}/{request.cache_salt}") for request in group
            ]
        return group

    async def administer(self, action: AdminAction) -> EngineStatus:
        """Do what an operator asks, and say how things stand then. Raises UnknownPolicyError, UnknownRequestError or
        EngineUnavailableError.
        """
        driver = self._require_driver()
        if self.state == "dead":
            raise self._death or EngineUnavailableError("the engine is dead")
        requests = self._named(action.request) if isinstance(action, Abort) else []
        for fact in facts_of(action, driver.core.state, requests):
            driver.put_fact(fact)
        if isinstance(action, Drain | Resume):
            self.state = "draining" if isinstance(action, Drain) else "ready"
        self._drain()
        return status_of(self.state, driver.core.state)

    def _named(self, request: str) -> list[int]:
        """The requests under way that a reply's public id or the seq of an arrival means."""
        live = self._require_driver().live
        found = self.registry.requests_of(request)
        if not found and request.isascii() and request.isdecimal() and len(request) < 17:
            found = [int(request)]
        return [seq for seq in found if seq in live]

    async def resume(self, reply_id: str, owner: str, on_output: OnOutput) -> ResumedReply:
        """Read a reply again, from its first output on; its reader until now ends. Raises UnknownReplyError."""
        return self.registry.resume(reply_id, owner, on_output)

    def leave(self, reply_id: str, reader: int) -> None:
        """A reader of a resumable reply (0: who submitted it) is gone. Without one it ends after a while."""
        self.registry.leave(reply_id, reader)

    async def cancel_reply(self, reply_id: str, owner: str) -> None:
        """End the requests of a reply. Raises UnknownReplyError."""
        for request in self.registry.find(reply_id, owner).requests:
            self.cancel(request)

    async def status(self, reply_id: str, owner: str) -> ReplyStatus:
        """Where the sequences of a reply are. Raises UnknownReplyError."""
        reply = self.registry.find(reply_id, owner)
        state = self._driver.core.state if self._driver is not None else None
        return reply_status(reply.submission.reply_id, reply.sequences, state, self._rows)

    async def explain(self, reply_id: str, owner: str) -> ExplainAnswer:
        """Where the time of a reply went, as far as the trace goes. Raises UnknownReplyError, NotExplainedError."""
        reply = self.registry.find(reply_id, owner)
        if self.run_folder is None:
            raise NotExplainedError("not_recorded", "this server does not record its runs, so nothing can be explained")
        return await self._explanations.explain(self.run_folder, reply.requests)

    def cancel(self, request: int, reason: str = "client") -> None:
        """End a request; nothing if it has ended."""
        driver = self._driver
        if driver is not None and request in driver.live:
            self.put_fact(Cancelled(c=request, request=request, reason=reason))

    def lose_front_end(self, front_end: int) -> None:
        """End all requests of a front end that has gone."""
        if self._driver is not None:
            self.put_fact(FrontEndLost(front_end=front_end))

    def put_fact(self, fact: Fact) -> None:
        """Queue a fact for the next tick."""
        self._require_driver().put_fact(fact)
        self._wake()

    def complete(self, replica: int, result: StepResult) -> None:
        """Queue a step's completion. The worker's clock is this machine's monotonic one."""
        self._require_driver().complete(
            replica,
            result,
            start_ns=max(result.start_ns - self._origin_ns, 0),
            end_ns=max(result.end_ns - self._origin_ns, 0),
        )
        self._wake()

    async def stop(self, reason: str = "stop") -> None:
        """End what still runs, close the log, stop the workers. Harmless when called twice."""
        if self.state == "loading":
            self.state = "dead"
        elif self.state in ("ready", "draining"):
            self.state = "draining"
            # First an answer for those who have just come, so that they can be cancelled like everybody.
            self._drain()
            for request in list(self._require_driver().core.state.requests):
                self.cancel(request, "shutdown")
            self._drain()
        await self._stop_workers()
        driver, self._driver = self._driver, None
        if driver is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self.state = "dead"
        if self._broken:
            driver.close()
        else:
            driver.end(reason)

    async def _stop_workers(self) -> None:
        await asyncio.gather(*(replica.stop() for replica in self._replicas))

    def end_text(self, request: int, index: int, position: int, reason: str) -> None:
        """An edge's word on a text; nothing if the request has ended."""
        if self._driver is not None:
            self._driver.end_text(request, index, position, reason)
            self._wake()

    def _ship(self, launched: Launched, body: bytes, payload: StepPayload) -> None:
        self._replicas[launched.replica].ship(launched, body, payload)

    def _send_grammar(self, replica: int, message: PrepareGrammar) -> None:
        self._replicas[replica].prepare_grammar(message)

    def _grammar_ready(self, request: int, error: GrammarError | None) -> None:
        if self._driver is not None:
            self._driver.grammar_ready(request, error)
            self._wake()

    def _watch_grammar(self, request: int) -> None:
        """Nobody waits for a grammar for ever: llguidance bounds its work, and this is for the day that it does not."""
        if self._loop is not None:
            self._loop.call_later(GRAMMAR_SECONDS, self._expire_grammar, request)

    def _expire_grammar(self, request: int) -> None:
        if self.grammars.expire(request):
            self._watch_grammar(request)

    def _wake(self) -> None:
        """One drain for each tick, however many facts come in it."""
        if not self._drain_scheduled and self._loop is not None:
            self._drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_scheduled = False
        driver = self._driver
        if driver is None or self.state == "dead":
            return
        self._guarded(lambda: driver.drain(self.now_ns()))
        if not self._broken:
            self._arm_timer(driver)

    def _guarded(self, action: Callable[[], None]) -> None:
        """Whatever the driver is asked to do: if that fails, nothing more can be said of the state."""
        try:
            action()
        except EventLMError as error:
            self._broken = True
            self._die(str(error))
            log.error("the engine cannot go on", error=str(error))
        except Exception as error:
            self._broken = True
            # Everybody who waits is told, and what it says may be of one of them.
            self._die(f"a defect in it, {type(error).__name__}")
            log.exception("the engine cannot go on: this is a defect, please report it")

    def _arm_timer(self, driver: Driver) -> None:
        """Wake when the core's earliest timer is due."""
        due_ns = driver.core.next_timer_ns
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_ns is not None and self._loop is not None:
            delay = max(due_ns - self.now_ns(), 0) / 1e9
            self._timer = self._loop.call_later(delay, self._fire_timers)

    def _fire_timers(self) -> None:
        driver = self._driver
        if driver is None:
            return
        due_ns, now_ns = driver.core.next_timer_ns, self.now_ns()
        if due_ns is not None and due_ns <= now_ns:
            self.put_fact(TimerDue(due_ns=now_ns))
        else:
            self._arm_timer(driver)

    def _replica_dead(self, reason: str) -> None:
        """A replica was given up. The others go on; without any the engine is dead."""
        self._live_replicas -= 1
        if not self._live_replicas:
            # The loss itself belongs into the log.
            self._drain()
            self._die(f"no worker is left: {reason}")
        log.error("replica given up", reason=reason, left=self._live_replicas)

    def _die(self, reason: str) -> None:
        """Tell everybody who waits."""
        self.state = "dead"
        error = self._death = EngineUnavailableError(f"the engine has died: {reason}")
        for undecided in self._undecided:
            if not undecided.done():
                undecided.set_exception(error)
        if self._driver is not None:
            self._driver.live.fail(error)

    def _history(self, first_s: int, last_s: int) -> Iterator[Event]:
        assert self.run_folder is not None
        return read_history(self.run_folder, first_s, last_s)

    def _require_driver(self) -> Driver:
        if self._driver is None:
            raise EngineUnavailableError("the engine is not running")
        return self._driver


def _report_broken(handler: object, event: Event, error: Exception) -> None:
    log.error("a broken observer was detached", observer=repr(handler), seq=event.s, error=repr(error))
