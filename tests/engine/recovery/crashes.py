"""`tests.simulation` with an engine that dies, and another one that goes on with what it has left in its files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec import structs

from eventlm.bus.log_reader import LogReader
from eventlm.bus.log_writer import LogWriter
from eventlm.bus.recorder import Effect, Recorder
from eventlm.bus.run_folder import TRACE_NAME
from eventlm.bus.spool import SpoolWriter
from eventlm.core.core import Core
from eventlm.core.state.replicaset import SetParts
from eventlm.core.state.sequence import State
from eventlm.engine.block_names import PAIRS_PER_BLOCK, BlockNames
from eventlm.engine.engine_core import EngineCore
from eventlm.engine.group_admission import reply_with_sinks
from eventlm.engine.live_requests import LiveRequests, ServedModel
from eventlm.engine.recovery.dead_run import CarriedRequests, Followers, RecoveredRun
from eventlm.engine.recovery.recover import RunBuilder, Takeover, recover
from eventlm.engine.request import EngineUnavailableError, RequestOutput, Submission, TakenOver
from eventlm.engine.request_registry import Reply, RequestRegistry
from eventlm.engine.request_spool import RequestSpool
from eventlm.engine.spool.records import SpoolHead
from eventlm.errors import EventLMError
from eventlm.events import Cancelled, Header, Recovered, Resumed
from eventlm.metrics.rows import EndedRows
from eventlm.metrics.store import MetricsStore
from eventlm.system.disk import SYSTEM_DISK
from eventlm.system.system import real_system
from eventlm.worker.fake.tokens import draw
from tests.replay.golden import GOLDEN
from tests.simulation import DIGEST_KEY, Client, Simulation
from tests.virtual_backend import VirtualBackend
from tests.virtual_worker import VirtualWorker
from tests.workload import MILLISECOND, Chaos, Machine, Outcome, make_core

RUN = "20260101-000000-000000"
#: The outcome of a request of which something was lost.
DAMAGED = Outcome("error", (-1,))
#: Replies are kept for longer than any simulation lasts.
_KEEP_NS = 10**18


class Death(NamedTuple):
    """When an engine dies: at its drain of this number, from 0. num_lines, num_bytes: how much of the drain it has
    written by then, the bytes beyond whole lines; None: all of it. spooled: what of its records it has written.
    delivered: whether outputs have left.
    """

    drain: int
    num_lines: int | None = None
    num_bytes: int = 0
    spooled: float = 1.0
    delivered: bool = False


class Killed(Exception):
    """The engine is dead."""


class DyingRecorder(Recorder):
    """Counts drains, and dies at one of them. lines: how long those of each drain are."""

    def __init__(self, writer: LogWriter, death: Death | None) -> None:
        super().__init__(writer)
        self.death = death
        self.lines: list[list[int]] = []

    def write(
        self, bodies: list[bytes], then: Effect, *, tokens: Sequence[bytes] = (), records: Sequence[bytes] = ()
    ) -> None:
        death, trace = self.death, self.writer.path
        if death is None or len(self.lines) != death.drain:
            before = self.writer.num_bytes
            super().write(bodies, then, tokens=tokens, records=records)
            self.lines.append(_lengths(trace, self.writer.num_bytes - before))
            return
        assert isinstance(self.writer.spool, SpoolWriter)
        spool = self.writer.spool.path
        num_trace, num_spool = trace.stat().st_size, spool.stat().st_size
        super().write(bodies, then if death.delivered else _nothing, tokens=tokens, records=records)
        lines = _lengths(trace, trace.stat().st_size - num_trace)
        if death.num_lines is not None:
            os.truncate(trace, num_trace + sum(lines[: death.num_lines]) + death.num_bytes)
        os.truncate(spool, num_spool + round(death.spooled * (spool.stat().st_size - num_spool)))
        # The system closes a dead process's files.
        self.writer._file.close()
        raise Killed


class CrashingSimulation(Simulation):
    """Each client reads a reply that can be resumed. Those that their engine has not answered ask the next one again.

    num_recoveries: how often another engine went on; recovered: what the last one found.
    """

    def __init__(
        self,
        folder: Path,
        machine: Machine,
        chaos: Chaos,
        *,
        seed: int,
        num_requests: int,
        deaths: Sequence[Death] = (),
        segment_bytes: int = 0,
        check_every: int = 0,
        damage: Callable[[Path, Path], None] | None = None,
    ) -> None:
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._deaths = list(deaths)
        self._damage = damage
        self.num_recoveries = 0
        self.recovered: RecoveredRun | None = None
        self._replies: dict[int, list[Client]] = {}
        self._waiting: list[list[Client]] = []
        self._spool_writer = SpoolWriter(SYSTEM_DISK, folder / "spool" / RUN)
        writer = LogWriter(real_system(), folder / "runs", RUN, segment_bytes=segment_bytes, spool=self._spool_writer)
        super().__init__(
            seed,
            num_requests=num_requests,
            chaos=chaos._replace(recoveries=0, poison_ppm=0),
            machine=machine,
            writer=writer,
            recorder=DyingRecorder(writer, self._next_death()),
            check_every=check_every,
        )

    def _next_death(self) -> Death | None:
        return self._deaths.pop(0) if self._deaths else None

    def connect(self, header: Header, core: Core, live: LiveRequests, spool: RequestSpool | None = None) -> EngineCore:
        self.registry = self.registry if core.next_seq else self._make_followers().registry
        spool = RequestSpool(
            self._spool_writer, live, self.registry, trace=self.folder / "runs" / RUN, boot_id="", origin_ns=0
        )
        if not core.next_seq:
            # A header's run is the name of its folder.
            header = structs.replace(header, run=RUN)
        return super().connect(header, core, live, spool)

    def run_to_death(self) -> None:
        """Run until the engine is killed, which raises Killed, or all has ended."""
        self._plan_life()
        while self.clock.has_more:
            super().advance()

    def advance(self) -> None:
        """As `Simulation.advance`. If the engine is killed, the next one goes on."""
        try:
            super().advance()
        except Killed:
            self._go_on()

    def _check_end(self) -> None:
        """Of the requests of which nothing was lost."""
        clients = self.clients
        self.clients = [client for client in clients if DAMAGED not in client.outcomes.values()]
        super()._check_end()
        self.clients = clients

    def _make_followers(self) -> Followers:
        rows = EndedRows()
        registry = RequestRegistry(
            keep_ns=_KEEP_NS,
            max_bytes=2**40,
            now_ns=lambda: self.now_ns,
            cancel=lambda request: None,
            wake=lambda delay_ns: None,
        )
        return Followers(registry, MetricsStore(sink=rows), rows)

    def _make_client(self, machine: Machine) -> Client:
        """With a seed of its own: those that the engine draws depend on the position of the arrival."""
        client = super()._make_client(machine)
        sampling = structs.replace(client.request.sampling, seed=len(self.clients))
        client.request = structs.replace(client.request, sampling=sampling)
        return client

    def _arrive(self, group: list[Client]) -> None:
        number = len(self._replies)
        self._replies[number] = group
        self._waiting.append(group)
        submission = Submission(reply_id=f"reply-{number}", owner="owner", is_resumable=True)
        reply, sinks = reply_with_sinks(
            self.registry,
            submission,
            [client.request for client in group],
            [partial(_put, each) for each in group],
            None,
        )

        def admitted(reason: str | None, seqs: list[int]) -> None:
            self._waiting.remove(group)
            if reason is None:
                self.registry.add(reply, seqs)
            self._answer(group, reason, seqs)

        members = [(client.request, sink) for client, sink in zip(group, sinks, strict=True)]
        self.engine_core.submit(members, admitted, submission)

    def _answer(self, group: list[Client], reason: str | None, seqs: list[int]) -> None:
        for client, seq in zip(group, seqs, strict=True):
            client.seq = seq
            client.rejected = reason
            if reason is None and client.request.scheduling.waits_for_grammar:
                self._build_grammar(seq)

    def _go_on(self) -> None:
        """Another engine goes on."""
        self.num_recoveries += 1
        if self._damage is not None:
            self._damage(self.folder / "runs" / RUN / TRACE_NAME, self._spool_writer.path)
        found = self.recovered = self.recover()
        assert found is not None, "the run was not found"
        self._spool_writer = SpoolWriter(SYSTEM_DISK, self.folder / "spool" / RUN)
        writer = LogWriter(
            real_system(),
            self.folder / "runs",
            RUN,
            segment_bytes=self._segment_bytes,
            spool=self._spool_writer,
            last=found.last_segment(SYSTEM_DISK),
        )
        self.recorder = DyingRecorder(writer, self._next_death())
        self.registry = found.followers.registry
        with LogReader(found.folder) as reader:
            for line in reader:
                if line.tag == "arrive":
                    self._learn_seed(line.event())
        self.engine_core = self.connect(found.header, found.core, found.live)
        self.engine_core.go_on()
        self.engine_core.put_fact(Recovered(reason="killed", down_ns=MILLISECOND))
        for replica, worker in enumerate(self.workers):
            worker.orphan()
            if isinstance(worker, VirtualWorker):
                # What it has sent is not heard by another engine.
                worker = self.workers[replica] = VirtualWorker(self, replica, worker.machine)
                worker.epoch = found.epochs[replica] - 1
            delay_ns = draw("restart", self.seed, replica) % 20 * MILLISECOND
            self.after(delay_ns, partial(self._start, worker, self.num_recoveries))
        self.engine_core.drain(self.now_ns)
        found.forget_attempts(SYSTEM_DISK)
        for seq in sorted(found.damaged & set(found.live.requests)):
            found.live.fail_request(seq, EngineUnavailableError("damaged"))
            self.engine_core.put_fact(Cancelled(request=seq))
        self.engine_core.drain(self.now_ns)
        if self.engine_core.core.state.paused:
            # Perhaps the operator's next call was lost.
            self.after(30 * MILLISECOND, lambda: self.engine_core.put_fact(Resumed()))
        for seq, request in self.engine_core.core.state.requests.items():
            if any(each.state is State.WAITING_FOR_GRAMMAR for each in request.sequences):
                self._build_grammar(seq)
        self._come_back()

    def _start(self, worker: VirtualWorker | VirtualBackend, num_recoveries: int) -> None:
        """Unless its engine has died meanwhile."""
        if num_recoveries == self.num_recoveries:
            worker.start()

    def _come_back(self) -> None:
        """Clients read their replies again, or ask again if there is none."""
        replies = {each.submission.reply_id: each for each in self.registry._replies.values()}
        waiting, self._waiting = self._waiting, []
        for number, group in list(self._replies.items()):
            reply = replies.get(f"reply-{number}")
            if self._is_damaged(group, reply):
                for client in group:
                    client.outcomes |= dict.fromkeys(range(client.request.n), DAMAGED)
                continue
            if reply is None:
                is_rejected = group not in waiting and all(client.rejected is not None for client in group)
                if not is_rejected:
                    assert group in waiting, "a reply that was admitted is lost"
                    del self._replies[number]
                    self._arrive(group)
                continue
            for client in group:
                client.begin_again()
            for client, seq in zip(group, reply.requests, strict=True):
                client.seq, client.rejected = seq, None
            reply.adopt(lambda index, output, group=group: _put(group[index], output))

    def _is_damaged(self, group: list[Client], reply: Reply | None) -> bool:
        assert self.recovered is not None
        is_forgotten = reply is not None and reply.outputs is None
        return is_forgotten or not self.recovered.damaged.isdisjoint(client.seq for client in group)

    def recover(self) -> RecoveredRun | None:
        """What another engine finds."""
        runs, spool = self.folder / "runs", self.folder / "spool"
        found = recover(SYSTEM_DISK, runs, spool, is_own=lambda header: True, takeover_of=self.takeover_of)

        assert not isinstance(found, CarriedRequests)
        return found

    def takeover_of(self, header: Header) -> Takeover:
        def make_the_core(header: Header, snapshot: bytes | None) -> Core:
            _, core = make_core(self.machine)
            if snapshot is None:
                return core
            others = [SetParts(each.config, each.plugins, each.predictor) for each in core.state.replicasets[1:]]
            first = core.state.replicasets[0]
            return Core.restored(first.config, first.plugins, snapshot, others)

        return Takeover(RunBuilder(make_the_core, self._make_live, self._make_followers), goes_on=True)

    def _make_live(self, header: Header, head: SpoolHead) -> LiveRequests:
        names = [
            BlockNames(
                key,
                block_size=machine.core.block_size,
                capacity=PAIRS_PER_BLOCK * machine.core.num_blocks,
                next_integer=integer,
            )
            for machine, (key, integer) in zip(self.machine.sets, head.block_names, strict=True)
        ]
        first_replica, others = 0, []
        for (before, other), own in zip(pairwise(self.machine.sets), names[1:], strict=True):
            first_replica += before.core.num_replicas
            others.append(ServedModel(other.core.models, own, other.core.block_size, 0, first_replica))
        size = self.machine.core.block_size
        return LiveRequests(names[0], block_size=size, seed_key=b"seeds", digest_key=DIGEST_KEY, others=others)


def dead_engine(folder: Path, death: Death) -> CrashingSimulation:
    """An engine that died while it made the golden run `fcfs_one_replica`."""
    golden = GOLDEN["fcfs_one_replica"]
    simulation = CrashingSimulation(
        folder, golden.machine, golden.chaos, seed=golden.seed, num_requests=golden.num_requests, deaths=[death]
    )
    with pytest.raises(Killed):
        simulation.run_to_death()
    return simulation


def _put(client: Client, output: RequestOutput | TakenOver | EventLMError) -> None:
    """One whose request was damaged gets an error and no more."""
    if isinstance(output, EventLMError):
        client.outcomes |= dict.fromkeys(range(client.request.n), DAMAGED)
    elif DAMAGED not in client.outcomes.values():
        client(output)


def _lengths(trace: Path, num_bytes: int) -> list[int]:
    """Of the last lines of a file."""
    content = trace.read_bytes()
    return [len(line) + 1 for line in content[len(content) - num_bytes :].split(b"\n")[:-1]]


def _nothing() -> None:
    """Outputs have not left."""
