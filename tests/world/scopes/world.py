"""A core and the small world around it, which says which facts can come next. Each fact is a drain of its own, or joins
the one before.

Time. Each drain comes a nanosecond after the one before, so everything that happens is short compared with deadlines,
margins and predicted times, which are at least milliseconds. A timer that is not due by then is waited for: it fires at
the start of the next epoch. So only the epochs and the order of two times matter.

Left out: steps in which some, but not all, of several rows end before their limit; drains of more than two facts,
except for groups of arrivals; facts about steps of workers that are gone; and `desync`, which is a loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from msgspec import structs

from eventlm.config import CoreConfig
from eventlm.core.core import Core
from eventlm.core.plugin import Batcher, Policy, Router
from eventlm.core.predictor import DEFAULT_COEFFICIENTS, Predictor
from eventlm.core.state.replica import Replica
from eventlm.core.state.replicaset import Plugins, SetParts
from eventlm.core.state.sequence import Sequence, State
from eventlm.events import (
    Arrived,
    BackendDown,
    BackendState,
    BackendUp,
    CacheFlushed,
    Cancelled,
    Decision,
    Fact,
    ForwardEnded,
    ForwardFailed,
    FrontEndLost,
    GrammarReady,
    Header,
    Paused,
    PolicySwapped,
    PredictorSwapped,
    Recovered,
    Resumed,
    StepCompleted,
    Streamed,
    TextEnded,
    TimerDue,
    WorkerLost,
    WorkerUp,
)
from eventlm.policies.fcfs import Fcfs
from eventlm.policies.fixed import Fixed
from eventlm.policies.pull import Pull
from tests.made_requests import make_arrival

#: The length of an epoch; deadlines and backoffs are shorter.
EPOCH_NS = 1_000_000_000_000
#: More nanoseconds than one epoch has drains.
_NEAR_NS = 1_000
LIMITS = {
    "block_size": 2,
    "num_blocks": 5,
    "num_replicas": 2,
    "max_model_len": 8,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 4,
    "max_queue_len": 8,
    "max_steps_in_flight": 2,
    "max_decodes_in_flight_per_seq": 2,
}


def is_near(due_ns: int, now_ns: int) -> bool:
    """Whether a time has come, or will come without a long wait."""
    return due_ns <= now_ns + _NEAR_NS


class Arrivals(NamedTuple):
    """Requests that differ only in their order of arrival."""

    request: Arrived
    count: int


def requests(prompt_tokens: int, max_tokens: int, *, count: int = 1, **fields: Any) -> Arrivals:
    """Equal requests with these fields."""
    return Arrivals(make_arrival(prompt_tokens=prompt_tokens, max_tokens=max_tokens, **fields), count)


@dataclass(frozen=True)
class Scope:
    """A small world. arrivals: the requests that may come, in any order. joins: drains may have two facts. chances: how
    often each optional event may happen; -1: as often as possible. limits: those of the first replicaset; others: those
    of further ones.

    The chances are: `cancel`; of workers `lose`, `crash`, `replace` (a worker comes up although the one before was not
    lost), `stale` (the loss of a worker that is gone already); `flush`, `pause`, `swap` (to the next policy), `predict`
    (steps take ten times as long from now on), `front_end` (a front end is lost), `recover` (the engine dies, and
    another one goes on); `end` (a row ends before its limit), `ends` (all rows do), `none` (a row has no token), `text`
    (an end is found in the text of a sequence that goes on), `refuse` (a grammar cannot be built); of backends `fail`
    (an attempt), `later` (the backend asks to wait), `metrics` (requests wait there, or none do), `down`.
    """

    name: str
    arrivals: tuple[Arrivals, ...]
    chances: dict[str, int] = field(default_factory=dict)
    policies: tuple[Policy, ...] = (Fcfs(),)
    batcher: Batcher = field(default_factory=Fixed)
    router: Router = field(default_factory=Pull)
    limits: dict[str, Any] = field(default_factory=dict)
    others: tuple[dict[str, Any], ...] = ()
    joins: bool = False

    def begin(self) -> World:
        """The world before anything has happened: no worker is up."""
        plugins = Plugins(
            policies={str(number): policy for number, policy in enumerate(self.policies)},
            policy="0",
            batcher=self.batcher,
            router=self.router,
        )
        predictor = Predictor.from_coefficients(DEFAULT_COEFFICIENTS)
        first, *others = (
            SetParts(CoreConfig(models=[str(number)], **(LIMITS | limits)), plugins, predictor)
            for number, limits in enumerate((self.limits, *self.others))
        )
        core = Core(*first, others)
        core.apply(Header(run="r", unix_start_ns="0", code_version="0", core=first[0], plugins=[], predictor=[0] * 5))
        made = [
            structs.replace(request, seed=str(number), blocks=[*_names(number, request, first.config.block_size)])
            for number, (request, _) in enumerate(self.arrivals)
        ]
        counts = [count for _, count in self.arrivals]
        return World(core, (first, *others), made, counts, dict(self.chances), joins=self.joins)


def _names(number: int, request: Arrived, block_size: int) -> Iterator[int]:
    """The names of a prompt's full blocks: its own, unless the scope names them."""
    for index in range(request.prompt_tokens // block_size):
        yield request.blocks[index] if request.blocks else block_name(number, 0, index)


def block_name(number: int, index: int, block: int) -> int:
    """The name of a block that a sequence shares only with sequences of equal requests."""
    return 1000 * (number + 1) + 100 * index + block


class Move(NamedTuple):
    """A fact that can come next. costs: the chance that it uses up. is_owed: it comes sooner or later in any case."""

    fact: Fact
    costs: str | None = None
    is_owed: bool = False
    is_marked: bool = True


class World:
    """A core, and what may still happen to it. parts: what its replicasets were made of. requests: one of each kind.
    left: how many of each kind have not come yet.
    """

    __slots__ = ("chances", "core", "joins", "left", "parts", "requests")

    def __init__(
        self,
        core: Core,
        parts: tuple[SetParts, ...],
        requests: list[Arrived],
        left: list[int],
        chances: dict[str, int],
        *,
        joins: bool,
    ) -> None:
        self.core = core
        self.parts = parts
        self.requests = requests
        self.joins = joins
        self.left = left
        self.chances = chances

    def apply(self, move: Move) -> list[Decision]:
        """Make a move. Returns what the core decided."""
        core, fact = self.core, move.fact
        if move.costs is not None and self.chances[move.costs] > 0:
            self.chances[move.costs] -= 1
        now_ns = core.state.now_ns
        if isinstance(fact, Arrived):
            self.left[int(fact.seed)] -= 1
        ts = now_ns if core.state.drain_open else now_ns + 1
        if isinstance(fact, TimerDue):
            ts = max(ts, fact.due_ns) if is_near(fact.due_ns, now_ns) else (now_ns // EPOCH_NS + 1) * EPOCH_NS
        decisions = core.apply(structs.replace(fact, s=core.next_seq, ts=ts, p=int(move.is_marked)))
        # These are large, and decide nothing.
        core.state.decisions, core.state.plans, core.state.latest_plans = [], {}, {}
        return decisions

    @property
    def is_done(self) -> bool:
        """Whether all requests that have come have ended."""
        return not self.core.state.requests

    def moves(self) -> list[Move]:
        """All moves that can come next, always in the same order."""
        if self.core.state.group:
            # In an incomplete group, the next member has to come.
            return [self._arrival(self.core.state.group[0])]
        moves = [*self._moves()]
        if not self.joins:
            return moves
        # A timer always has a drain of its own.
        joined = [move for move in moves if not isinstance(move.fact, TimerDue)]
        if self.core.state.drain_open:
            # The second fact ends the drain. So that there always is one, a fact without effect is added.
            return [*joined, Move(Cancelled(request=0), is_owed=True)]
        return moves + [move._replace(is_marked=False, is_owed=False) for move in joined]

    def _moves(self) -> Iterator[Move]:
        state = self.core.state
        yield from self._arrivals()
        for replica in state.replicas:
            yield from self._of_backend(replica) if replica.capacity is not None else self._of_worker(replica)
        for request in state.requests.values():
            yield from self._of_request(request.arrival, request.sequences)
        due_ns = self.core.next_timer_ns
        if due_ns is not None:
            yield Move(TimerDue(due_ns=due_ns), is_owed=True)
        yield from self._of_operator()

    def _may(self, chance: str) -> bool:
        return self.chances.get(chance, 0) != 0

    def _arrivals(self) -> Iterator[Move]:
        for template, count in zip(self.requests, self.left, strict=True):
            if count:
                yield self._arrival(template)

    def _arrival(self, template: Arrived) -> Move:
        """The arrival of the next member of a group."""
        index = len(self.core.state.group)
        is_last = index + 1 == template.group_size
        return Move(structs.replace(template, group_index=index), is_owed=index > 0, is_marked=is_last)

    def _of_operator(self) -> Iterator[Move]:
        state = self.core.state
        if state.paused:
            yield Move(Resumed(), is_owed=True)
        elif self._may("pause"):
            yield Move(Paused(), "pause")
        if self._may("flush"):
            yield Move(CacheFlushed(), "flush")
        if self._may("predict"):
            slower = [10 * each for each in state.replicasets[0].predictor.coefficients()]
            yield Move(PredictorSwapped(coefficients=slower), "predict")
        if self._may("swap"):
            replicaset = state.replicasets[0]
            name = str((int(replicaset.policy_name) + 1) % len(replicaset.plugins.policies))
            yield Move(PolicySwapped(name=name), "swap")
        if self._may("recover"):
            yield Move(Recovered(reason="killed", down_ns=1), "recover")
        if self._may("front_end"):
            yield Move(FrontEndLost(front_end=1), "front_end")

    def _of_request(self, arrival: Arrived, sequences: list[Sequence]) -> Iterator[Move]:
        if self._may("cancel"):
            yield Move(Cancelled(request=arrival.s), "cancel")
        if sequences[0].state is State.WAITING_FOR_GRAMMAR:
            yield Move(GrammarReady(request=arrival.s), is_owed=True)
            if self._may("refuse"):
                yield Move(GrammarReady(request=arrival.s, error="no"), "refuse")
        if arrival.scheduling.has_text_ends:
            for sequence in sequences:
                position = sequence.num_output_tokens
                if sequence.state is State.CLOSING:
                    yield Move(TextEnded(request=arrival.s, index=sequence.index, position=position), is_owed=True)
                if sequence.state is not State.FINISHED and position and self._may("text"):
                    end = TextEnded(request=arrival.s, index=sequence.index, position=position - 1, reason="stop")
                    yield Move(end, "text")

    def _of_worker(self, replica: Replica) -> Iterator[Move]:
        index, epoch = replica.index, replica.epoch
        if self._may("stale"):
            yield Move(WorkerLost(replica=index, epoch=epoch - 1), "stale")
        if not replica.up:
            yield Move(WorkerUp(replica=index, epoch=epoch + 1), is_owed=True)
            return
        if self._may("lose"):
            yield Move(WorkerLost(replica=index, epoch=epoch), "lose")
        if self._may("crash"):
            yield Move(WorkerLost(replica=index, epoch=epoch, crashed=True), "crash")
        if self._may("replace"):
            yield Move(WorkerUp(replica=index, epoch=epoch + 1), "replace")
        if replica.in_flight:
            yield from self._completions(replica)

    def _completions(self, replica: Replica) -> Iterator[Move]:
        """Complete the oldest step. Each row with a token produces from one to the most tokens; if there is a chance
        for it, one row or all of them end, or one has no token.
        """
        step = replica.in_flight[0]
        sequences = [*step.decodes, *(row.sequence for row in step.chunks)]
        # What the row of an ended sequence produces is dropped.
        open_rows = [row for row, most in enumerate(step.most) if most and not sequences[row].ended]
        full = [min(most, 1) for most in step.most]
        choices = [range(1, step.most[row] + 1) for row in open_rows]
        for counts in product(*choices):
            produced = full[:]
            for row, count in zip(open_rows, counts, strict=True):
                produced[row] = count
            yield Move(self._completed(replica, produced), is_owed=True)
        for row in open_rows:
            if self._may("end"):
                yield Move(self._completed(replica, full, [row]), "end")
            if self._may("none"):
                yield Move(self._completed(replica, [*full[:row], 0, *full[row + 1 :]]), "none")
        if len(open_rows) > 1 and self._may("ends"):
            yield Move(self._completed(replica, full, open_rows), "ends")

    def _completed(self, replica: Replica, produced: list[int], ended_rows: Iterable[int] = ()) -> StepCompleted:
        step = replica.in_flight[0]
        return StepCompleted(
            c=step.launch_seq,
            replica=replica.index,
            epoch=replica.epoch,
            step=step.step,
            start_ns=0,
            end_ns=1,
            produced=produced,
            ends=[(row, "eos") for row in ended_rows],
            filled=[*_filled(replica, produced)],
        )

    def _of_backend(self, replica: Replica) -> Iterator[Move]:
        index, epoch = replica.index, replica.epoch
        if not replica.up:
            yield Move(BackendUp(replica=index, epoch=epoch + 1, name=str(index)), is_owed=True)
        elif self._may("down"):
            yield Move(BackendDown(replica=index, epoch=epoch, reason="failed"), "down")
        if replica.up and self._may("metrics"):
            for waiting in (0, 2):
                yield Move(BackendState(replica=index, epoch=epoch, running=1, waiting=waiting), "metrics")
        forwards = self.core.state.set_of(replica).forwards
        assert forwards is not None
        for sequence in replica.running:
            attempts = forwards.attempts[sequence.id]
            for attempt in filter(None, (attempts.current, attempts.hedge)):
                yield from self._of_attempt(sequence, attempt)

    def _of_attempt(self, sequence: Sequence, attempt: int) -> Iterator[Move]:
        (request, index), shown = sequence.id, sequence.num_output_tokens
        most = sequence.max_total_tokens - sequence.prompt_tokens
        end = ForwardEnded(request=request, index=index, attempt=attempt, reason="length", num_tokens=most)
        yield Move(end, is_owed=True)
        if shown < most:
            yield Move(Streamed(rows=[(request, index, attempt, shown + 1)]))
        if self._may("later"):
            failure = ForwardFailed(
                request=request, index=index, attempt=attempt, kind="overloaded", retry_after_ns=EPOCH_NS // 100
            )
            yield Move(failure, "later")
        if self._may("fail"):
            for kind in ("connect", "overloaded"):
                failure = ForwardFailed(request=request, index=index, attempt=attempt, kind=kind)
                yield Move(failure, "fail")
            if shown:
                failure = ForwardFailed(request=request, index=index, attempt=attempt, kind="broken", can_continue=True)
                yield Move(failure, "fail")


def _filled(replica: Replica, produced: list[int]) -> Iterator[tuple[int, list[int]]]:
    """(row, names) of the blocks whose last token's KV the oldest step has stored, as the engine names them."""
    step, size = replica.in_flight[0], replica.config.block_size
    num_decodes = len(step.decodes)
    for row, sequence in enumerate([*step.decodes, *(each.sequence for each in step.chunks)]):
        if row < num_decodes:
            stored = sequence.num_tokens + produced[row] - 1
        else:
            stored = step.chunks[row - num_decodes].end + max(produced[row] - 1, 0)
        first = len(sequence.block_names)
        if stored // size > first and not sequence.ended:
            number = int(sequence.arrival.seed)
            yield row, [block_name(number, sequence.index, block) for block in range(first, stored // size)]
