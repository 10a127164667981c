"""Other servers in a simulation: what they are sent goes on as the models of them say, in virtual time.

The first token and the end of an answer come when they are due. In between, the answers of a server go on together,
once in the time of a token. The same attempt of the same request draws the same noise and the same failure on every
engine.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, cast

from msgspec import Struct, structs

from eventlm.core.predictor import StepShape
from eventlm.core.state.backend_state import Attempts
from eventlm.core.state.core_state import CoreState
from eventlm.core.state.sequence import Sequence
from eventlm.events import BackendState, Fact, Forwarded, ForwardEnded, ForwardFailed, Relayed, Streamed, Withdrawn
from eventlm.replay.cost.backend_model import BackendCost, FailureRate
from eventlm.replay.cost.model import MILLION, draw
from eventlm.replay.workload.workload import NEVER, WorkloadRequest
from eventlm.types import FinishReason, SequenceId

AttemptName = tuple[int, int, int]

#: What is drawn for an attempt: whether it fails, after how many tokens, and its pace until the first token and after.
_FAILS, _WHERE, _FIRST, _TOKENS = range(4)
#: More than the samples of a request.
_SAMPLES = 1 << 16


class Agenda(Protocol):
    """The future of a simulation."""

    def now_ns(self) -> int:
        """The present time."""
        ...

    def at(self, due_ns: int, action: Callable[[], None]) -> None:
        """Do something at a time that has not passed."""
        ...

    def put(self, fact: Fact) -> None:
        """Tell the core now."""
        ...


class ModelledBackend(NamedTuple):
    """The model of a replica that is another server. seed: of what is drawn. look: gets what each attempt finds there,
    as if it were a step: tokens of its prompt to compute, and answers that have begun.
    """

    cost: BackendCost
    seed: int = 0
    look: Callable[[StepShape], None] | None = None


class WholeAnswer(NamedTuple):
    """All output of a sequence: so many tokens, and why it ends."""

    num_tokens: int
    reason: FinishReason


def answer_of(request: WorkloadRequest, index: int) -> WholeAnswer:
    """What a server answers for a sequence, whatever kind of engine the workload is from."""
    output = request.outputs[index]
    of_text = output.text_end.position if output.text_end is not None else NEVER
    end = min(output.worker_end, of_text)
    if request.arrival.scheduling.kind != "generate":
        return WholeAnswer(end if end < NEVER else 1, "complete")
    if end == NEVER:
        return WholeAnswer(request.arrival.max_tokens, "length")
    if output.text_end is not None and end == of_text:
        return WholeAnswer(end, cast(FinishReason, output.text_end.reason))
    # The length of one that was cut short is another's.
    is_own = output.reason and output.num_tokens == end
    return WholeAnswer(end, cast(FinishReason, output.reason) if is_own else output.worker_reason)


class _Attempt(Struct, eq=False):
    """A request that a server has. prompt_tokens: that its cache lacks. shown: output tokens before this attempt, told:
    with it so far. answer: all of it. first_ppm, token_ppm: times over those of the model. failure: it ends so, after
    the tokens of `answer`. began_at: the server's progress at its first token. waited_ns: how long ago it was sent.
    """

    name: AttemptName
    prompt_tokens: int
    shown: int
    told: int
    answer: WholeAnswer
    first_ppm: int
    token_ppm: int
    failure: FailureRate | None = None
    began_at: int = -1
    waited_ns: int = 0

    @property
    def ends_at(self) -> int:
        """The server's progress at its last token."""
        return self.began_at + (self.answer.num_tokens - self.shown - 1) * self.token_ppm

    def tokens_at(self, progress: int) -> int:
        """Output tokens at a progress of the server since its first one."""
        return min(self.shown + 1 + (progress - self.began_at) // self.token_ppm, self.answer.num_tokens)


class SimulatedBackend:
    """One server. Its progress counts how far an answer has come that goes on as the model says, in millionths of a
    token.
    """

    def __init__(self, cost: BackendCost, agenda: Agenda) -> None:
        self._cost = cost
        self._agenda = agenda
        #: Those that wait for a slot, those whose prompts are computed, and those that have begun.
        self._waiting: dict[AttemptName, _Attempt] = {}
        self._entering: dict[AttemptName, _Attempt] = {}
        self._running: dict[AttemptName, _Attempt] = {}
        self._progress = self._progress_ns = self._told_at = 0
        #: Until when the prompts take that it has, and until when answers stand still for them.
        self._prompts_ns = self._stalled_ns = 0
        #: The number of the latest wake-up; those before it are void.
        self._wake = 0

    @property
    def load(self) -> tuple[int, int]:
        """Requests that it computes, and those that wait there."""
        return len(self._entering) + len(self._running), len(self._waiting)

    @property
    def num_answers(self) -> int:
        """Answers that have begun."""
        return len(self._running)

    def forward(self, attempt: _Attempt) -> None:
        """Take a request."""
        self._waiting[attempt.name] = attempt
        self._start_next()

    def resume(self, attempt: _Attempt) -> None:
        """Have a request whose answer has begun."""
        self._run(attempt)
        self._plan()

    def end(self, name: AttemptName) -> None:
        """Nobody wants this answer any more; nothing if it has none under way."""
        self._advance()
        for each in (self._waiting, self._entering, self._running):
            each.pop(name, None)
        self._start_next()

    def lose(self) -> None:
        """Nobody wants any answer any more."""
        for each in (self._waiting, self._entering, self._running):
            each.clear()
        self._plan()

    def _start_next(self) -> None:
        """Begin with those that have a slot."""
        cost, now_ns = self._cost, self._agenda.now_ns()
        while self._waiting and (not cost.slots or len(self._entering) + len(self._running) < cost.slots):
            attempt = self._waiting.pop(next(iter(self._waiting)))
            self._advance()
            self._entering[attempt.name] = attempt
            taken_ns = cost.first_token_ns(
                attempt.prompt_tokens,
                queued_ns=max(self._prompts_ns - now_ns, 0),
                num_running=len(self._running),
            )
            self._prompts_ns = max(self._prompts_ns, now_ns) + cost.prefill_ns(attempt.prompt_tokens)
            self._stalled_ns = max(self._stalled_ns, now_ns) + cost.stall_ps * attempt.prompt_tokens // 1000
            due_ns = now_ns + max(taken_ns * attempt.first_ppm // MILLION - attempt.waited_ns, 1)
            self._agenda.at(due_ns, lambda attempt=attempt: self._begin(attempt))  # type: ignore[misc]
        self._plan()

    def _begin(self, attempt: _Attempt) -> None:
        """The first token of an answer."""
        if self._entering.pop(attempt.name, None) is None:
            return
        self._run(attempt)
        self._tell([attempt])
        self._start_next()

    def _run(self, attempt: _Attempt) -> None:
        """It has just had the first token after those that were shown."""
        self._advance()
        if not self._running:
            self._told_at = self._progress
        attempt.began_at = self._progress
        self._running[attempt.name] = attempt

    def _go_on(self, wake: int) -> None:
        if wake == self._wake:
            self._advance()
            self._told_at = self._progress
            self._tell(list(self._running.values()))
            self._start_next()

    def _tell(self, attempts: abc.Sequence[_Attempt]) -> None:
        """Put the facts of what has come of some answers, and their ends."""
        rows, ended = [], []
        for attempt in attempts:
            total = max(attempt.tokens_at(self._progress), attempt.told)
            if total > attempt.told:
                rows.append((*attempt.name, total))
                attempt.told = total
            if total >= attempt.answer.num_tokens:
                ended.append(attempt)
        if rows:
            self._agenda.put(Streamed(rows=rows))
        for attempt in ended:
            del self._running[attempt.name]
            if attempt.failure is not None:
                self._agenda.put(failed(attempt.name, attempt.failure))
            else:
                request, index, number = attempt.name
                fact = ForwardEnded(
                    request=request,
                    index=index,
                    attempt=number,
                    reason=attempt.answer.reason,
                    num_tokens=attempt.told,
                )
                due_ns = self._agenda.now_ns() + self._cost.end_ns
                self._agenda.at(due_ns, lambda fact=fact: self._agenda.put(fact))  # type: ignore[misc]

    def _advance(self) -> None:
        """Bring the progress to the present."""
        now_ns = self._agenda.now_ns()
        since_ns = max(self._progress_ns, min(self._stalled_ns, now_ns))
        interval_ps = self._cost.token_interval_ps(len(self._running))
        self._progress += (now_ns - since_ns) * 1000 * MILLION // interval_ps
        self._progress_ns = now_ns

    def _plan(self) -> None:
        """Wake up at the next token of all, or the next end if that is sooner."""
        self._wake += 1
        if not self._running:
            return
        target = min([self._told_at + MILLION, *(each.ends_at for each in self._running.values())])
        interval_ps = self._cost.token_interval_ps(len(self._running))
        left_ns = -(-max(target - self._progress, 0) * interval_ps // (1000 * MILLION))
        due_ns = max(self._agenda.now_ns(), self._stalled_ns) + max(left_ns, 1)
        self._agenda.at(due_ns, lambda wake=self._wake: self._go_on(wake))  # type: ignore[misc]


class SimulatedBackends:
    """All replicas of an engine that are other servers. models: by replica; None: its facts come from elsewhere."""

    def __init__(self, models: abc.Sequence[ModelledBackend | None], agenda: Agenda) -> None:
        self._agenda = agenda
        self._models = models
        self._servers = [None if model is None else SimulatedBackend(model.cost, agenda) for model in models]
        #: Of live sequences that were forwarded: the output tokens shown, and the replica of each attempt.
        self._shown: dict[SequenceId, int] = {}
        self._replicas: dict[SequenceId, dict[int, int]] = {}
        self._streamed = Streamed(rows=[])

    def forward(self, forwarded: Forwarded, request: WorkloadRequest, number: int) -> None:
        """A sequence of request `number` of the workload is sent to a server."""
        identity = SequenceId(forwarded.request, forwarded.index)
        shown = self._shown.setdefault(identity, 0)
        self._replicas.setdefault(identity, {})[forwarded.attempt] = forwarded.replica
        model, server = self._models[forwarded.replica], self._servers[forwarded.replica]
        if model is None or server is None:
            return
        drawn = _Draws(model.seed, number * _SAMPLES + forwarded.index, forwarded.attempt)
        attempt = _attempt((*identity, forwarded.attempt), request, shown, forwarded.cached_tokens, model.cost, drawn)
        if model.look is not None:
            model.look(StepShape(prefill_tokens=attempt.prompt_tokens, num_decodes=server.num_answers))
        failure = _failure(model.cost, drawn.one_of(_FAILS, MILLION))
        if failure is not None:
            num_tokens, reason = attempt.answer
            if drawn.one_of(_WHERE, MILLION) >= failure.begun_ppm or num_tokens <= shown:
                due_ns = self._agenda.now_ns() + failure.delay_ns
                self._agenda.at(due_ns, lambda: self._agenda.put(failed(attempt.name, failure)))
                return
            attempt.failure = failure
            attempt.answer = WholeAnswer(shown + 1 + drawn.one_of(_WHERE, num_tokens - shown), reason)
        server.forward(attempt)

    def resume(self, state: CoreState, live: Mapping[int, WorkloadRequest]) -> None:
        """Go on with the sequences that are under way where the simulation begins; what has not failed yet does not.
        live: the first requests of the workload, by their seqs.
        """
        numbers = {seq: number for number, seq in enumerate(live)}
        for replicaset in state.replicasets:
            for identity, attempts in replicaset.forwards.attempts.items() if replicaset.forwards is not None else ():
                seq, index = identity
                self._resume(state.requests[seq].sequences[index], attempts, live[seq], numbers[seq])

    def _resume(self, sequence: Sequence, attempts: Attempts, request: WorkloadRequest, number: int) -> None:
        shown, now_ns = sequence.num_output_tokens, self._agenda.now_ns()
        self._shown[sequence.id] = shown
        replicas = self._replicas[sequence.id] = {}
        of_attempts = ((attempts.current, sequence.replica), (attempts.hedge, attempts.hedge_replica))
        for attempt, replica in of_attempts:
            if not attempt:
                continue
            replicas[attempt] = replica
            model, server = self._models[replica], self._servers[replica]
            if model is None or server is None:
                continue
            drawn = _Draws(model.seed, number * _SAMPLES + sequence.index, attempt)
            made = _attempt((*sequence.id, attempt), request, shown, sequence.cached_tokens, model.cost, drawn)
            if shown:
                made.shown -= 1
                server.resume(made)
            else:
                made.waited_ns = now_ns - attempts.sent_ns
                server.forward(made)

    def withdraw(self, withdrawn: Withdrawn) -> None:
        """An attempt is ended."""
        self._end(withdrawn.replica, (withdrawn.request, withdrawn.index, withdrawn.attempt))

    def finish(self, identity: SequenceId) -> None:
        """A sequence has ended."""
        self._shown.pop(identity, None)
        for attempt, replica in self._replicas.pop(identity, {}).items():
            self._end(replica, (*identity, attempt))

    def lose(self) -> None:
        """The engine that sent all requests has died."""
        self._replicas.clear()
        for server in self._servers:
            if server is not None:
                server.lose()

    def measured(self, fact: BackendState) -> BackendState:
        """What the server's metrics say in place of a recorded fact, as far as that said anything."""
        server = self._servers[fact.replica]
        if server is None:
            return fact
        now: dict[str, Any] = dict(zip(("running", "waiting"), server.load, strict=True))
        return structs.replace(fact, **{name: n for name, n in now.items() if getattr(fact, name) >= 0}, kv_used_ppm=-1)

    def stream(self, streamed: Streamed) -> None:
        """The core gets this fact."""
        self._streamed = streamed

    def relay(self, relayed: Relayed) -> Iterator[tuple[SequenceId, int, int]]:
        """The sequences that it was about, with their output tokens before and after it."""
        dropped = set(relayed.dropped)
        for row, (request, index, _, total) in enumerate(self._streamed.rows):
            identity = SequenceId(request, index)
            if row not in dropped:
                before, self._shown[identity] = self._shown.get(identity, 0), total
                yield identity, before, total

    def _end(self, replica: int, name: AttemptName) -> None:
        server = self._servers[replica]
        if server is not None:
            server.end(name)


class _Draws(NamedTuple):
    """What is drawn for an attempt of a sequence: the same on every engine."""

    seed: int
    key: int
    attempt: int

    def one_of(self, what: int, choices: int) -> int:
        """One of so many numbers."""
        return draw(self.seed, self.key, self.attempt * (_TOKENS + 1) + what) * choices >> 64


def _attempt(
    name: AttemptName, request: WorkloadRequest, shown: int, cached_tokens: int, cost: BackendCost, drawn: _Draws
) -> _Attempt:
    """An attempt that does not fail."""
    firsts, tokens = cost.first_ratios_ppm, cost.token_ratios_ppm
    return _Attempt(
        name=name,
        prompt_tokens=max(request.arrival.prompt_tokens + shown - cached_tokens, 0),
        shown=shown,
        told=shown,
        answer=answer_of(request, name[1]),
        first_ppm=firsts[drawn.one_of(_FIRST, len(firsts))] if firsts else MILLION,
        token_ppm=tokens[drawn.one_of(_TOKENS, len(tokens))] if tokens else MILLION,
    )


def _failure(cost: BackendCost, drawn: int) -> FailureRate | None:
    """The failure that a number below a million stands for; None: the attempt succeeds."""
    for failure in cost.failures:
        if drawn < failure.rate_ppm:
            return failure
        drawn -= failure.rate_ppm
    return None


def failed(name: AttemptName, failure: FailureRate) -> ForwardFailed:
    """The fact that an attempt has failed so."""
    request, index, attempt = name
    return ForwardFailed(
        request=request,
        index=index,
        attempt=attempt,
        kind=failure.kind,
        status=failure.status,
        retry_after_ns=failure.retry_after_ns,
        can_continue=failure.can_continue,
    )
