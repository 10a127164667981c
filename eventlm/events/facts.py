"""Facts: what reached the engine from outside. Lengths, block integers and reasons; never a token or a text."""

from __future__ import annotations

from eventlm.events.base import Fact
from eventlm.scheduling_params import SchedulingParams
from eventlm.types import WorkerEnd


class Arrived(Fact, frozen=True, kw_only=True, tag="arrive"):
    """A request came in. Its `s` is the request's identity from here on.

    Requests of one HTTP body or one offline call are a group: stamped one after the other in one drain, each with
    the group's size and its own index in it, admitted or rejected as one.
    """

    prompt_tokens: int
    #: One integer for each full block of the prompt; it stands for the block's content and all that precedes it.
    blocks: list[int] = []
    n: int = 1
    #: Most tokens to produce; 0 for score and pool.
    max_tokens: int
    scheduling: SchedulingParams
    group_size: int = 1
    group_index: int = 0
    #: Seed of the sampling noise, unsigned 64 bit, as a string because JSON numbers end at 2^53.
    seed: str = "0"
    #: Which of the engine's replicasets it is for, by its place in the header; 0 is the first.
    replicaset: int = 0


class Cancelled(Fact, frozen=True, kw_only=True, tag="cancel"):
    """The client disconnected, or an operator or the server ended the request."""

    request: int
    reason: str = "client"


class StepCompleted(Fact, frozen=True, kw_only=True, tag="done"):
    """A worker finished a step. Rows are those of the launch: its decodes, then its chunks.

    `start_ns` and `end_ns` are the worker's own, on the run's time axis. `digest` is a keyed hash of the step's
    tokens. `ends` and `filled` are sparse: (row, reason) and (row, block integers that the row's KV completed).
    stages: of a pipeline, the (start_ns, end_ns) of each stage, the first one first, on the same axis.
    """

    replica: int
    epoch: int
    step: int
    start_ns: int
    end_ns: int
    digest: str = ""
    produced: list[int]
    ends: list[tuple[int, WorkerEnd]] = []
    filled: list[tuple[int, list[int]]] = []
    stages: list[tuple[int, int]] = []

    @property
    def busy_ns(self) -> int:
        """For how long it kept the worker from other steps; of a pipeline its slowest stage."""
        if not self.stages:
            return self.end_ns - self.start_ns
        return max(end_ns - start_ns for start_ns, end_ns in self.stages)

    @property
    def freed_ns(self) -> int:
        """When the worker could begin the next step; of a pipeline its first stage."""
        return self.stages[0][1] if self.stages else self.end_ns


class TextEnded(Fact, frozen=True, kw_only=True, tag="text_end"):
    """The text of a sequence was searched for ends. `position` counts the output tokens that belong to it.

    After `closing`, an empty `reason` says that the search found no earlier end.
    """

    request: int
    index: int
    position: int
    reason: str = ""


class WorkerUp(Fact, frozen=True, kw_only=True, tag="worker_up"):
    """A worker is ready. Its epoch is larger than those of all earlier workers of the replica."""

    replica: int
    epoch: int


class WorkerLost(Fact, frozen=True, kw_only=True, tag="worker_lost"):
    """A worker died or stopped responding. Its KV cache and its steps in flight are lost.

    crashed: its own code ended it, by an error that it reported or a signal such as SIGSEGV. Otherwise it may have
    been killed or stopped from outside. rank: which of the replica's ranks was lost first; step: the one that it had in
    hand, whose rows are the suspects. -1: not known, none is to blame, or the replica is one process, which has its
    oldest step in hand.
    """

    replica: int
    epoch: int
    reason: str = ""
    crashed: bool = False
    rank: int = -1
    step: int = -1


class Desynced(Fact, frozen=True, kw_only=True, tag="desync"):
    """A worker's own length of a sequence differs from the launch's. It computes no more and is treated as lost.

    rank: which of the replica's ranks; -1: the replica is one process.
    """

    replica: int
    epoch: int
    step: int
    rank: int = -1


class Recovered(Fact, frozen=True, kw_only=True, tag="recovered"):
    """Another engine goes on with the run of one that died or handed over. All workers are lost with their caches and
    steps, and all requests to other servers; no sequence is to blame.

    reason: why the engine before it ended, as far as that is known, such as `killed` or `reboot`; `restart` if it
    handed over. down_ns: for how long there was none, until this fact. run: at the beginning of a run, the one before,
    whose requests go on in this one under other limits or plug-ins, or in another version; empty within a run.
    """

    reason: str = ""
    down_ns: int = 0
    run: str = ""


class TimerDue(Fact, frozen=True, kw_only=True, tag="timer"):
    """The clock has passed `due_ns`. All timers up to that time fire."""

    due_ns: int


class PredictorSwapped(Fact, frozen=True, kw_only=True, tag="predictor"):
    """New coefficients of the step-time model, in picoseconds for each unit (see `eventlm.core.predictor`)."""

    coefficients: list[int]
    #: Which replicaset's.
    replicaset: int = 0


class PolicySwapped(Fact, frozen=True, kw_only=True, tag="policy"):
    """Another of the policies that were installed at the start takes over."""

    name: str
    #: In which replicaset; -1: in all.
    replicaset: int = -1


class CacheFlushed(Fact, frozen=True, kw_only=True, tag="flush_cache"):
    """Every prefix cache drops the blocks that no sequence holds. Held blocks stay and can still be hit."""

    #: Of which replicaset; -1: of all.
    replicaset: int = -1


class FrontEndLost(Fact, frozen=True, kw_only=True, tag="front_end_lost"):
    """A front-end process died. Its requests are cancelled."""

    front_end: int


class GrammarReady(Fact, frozen=True, kw_only=True, tag="grammar"):
    """The grammar matcher of a request was built, or could not be built (`error`)."""

    request: int
    error: str = ""


class Paused(Fact, frozen=True, kw_only=True, tag="pause"):
    """Nothing more is launched until `resume`. Steps in flight complete."""


class Resumed(Fact, frozen=True, kw_only=True, tag="resume"):
    """Launches continue after a `pause`."""
