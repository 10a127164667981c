"""What a plug-in sees and answers: policies order, batchers size chunks, routers choose replicas.

A plug-in is a frozen msgspec struct; its fields are its parameters. It is pure: the same arguments give the same
answer, in this process and in any other. It may read the views it is given and must not keep or change them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from typing import ClassVar

from msgspec import Struct

from eventlm.core.predictor import PICOSECONDS_PER_NANOSECOND, Predictor, StepShape
from eventlm.core.rendezvous import rendezvous
from eventlm.events import Arrived
from eventlm.types import ceil_div, parts_per_million

#: Slack under a policy that has no deadlines of its own is measured against EDF's defaults.
DEFAULT_DEADLINE_MULTIPLIER_PPM = 1_500_000
DEFAULT_MIN_DEADLINE_NS = 500_000_000


class SequenceView(Struct, kw_only=True, eq=False):
    """A waiting sequence or a partial prefill, as plug-ins see it. Never its true output length.

    Times are nanoseconds since the run started; `deadline_ns` counts from the arrival and is 0 if the request has
    none. `prompt_tokens` includes, after a preemption, the kept output; `done_tokens` of them are done or under way.
    `cached_tokens` of a partial prefill were found in the cache before any preemption, as its request reports them; of
    a waiting sequence they can be hit now, and are 0 under a policy without `reads_prefixes`. `prefill_ns`
    is the predicted time of the whole prompt, `remaining_ns` of what is left.
    """

    request: int
    index: int
    priority: int
    arrival_ns: int
    deadline_ns: int
    prompt_tokens: int
    prefill_ns: int
    remaining_ns: int
    service_class: str
    session: int
    done_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @classmethod
    def of(cls, arrival: Arrived, index: int, prefill_ns: int) -> SequenceView:
        """The view of a sequence that has just arrived."""
        return cls(
            request=arrival.s,
            index=index,
            priority=arrival.scheduling.priority,
            arrival_ns=arrival.ts,
            deadline_ns=arrival.scheduling.deadline_ns or arrival.scheduling.slo_ttft_ns,
            prompt_tokens=arrival.prompt_tokens,
            prefill_ns=prefill_ns,
            remaining_ns=prefill_ns,
            service_class=arrival.scheduling.service_class,
            session=arrival.scheduling.session,
        )

    def relative_deadline_ns(
        self,
        multiplier_ppm: int = DEFAULT_DEADLINE_MULTIPLIER_PPM,
        min_deadline_ns: int = DEFAULT_MIN_DEADLINE_NS,
    ) -> int:
        """The request's own deadline, else a multiple of its predicted prefill time, at least `min_deadline_ns`."""
        if self.deadline_ns:
            return self.deadline_ns
        return max(multiplier_ppm * self.prefill_ns // 1_000_000, min_deadline_ns)

    def slack_ns(
        self,
        now_ns: int,
        multiplier_ppm: int = DEFAULT_DEADLINE_MULTIPLIER_PPM,
        min_deadline_ns: int = DEFAULT_MIN_DEADLINE_NS,
    ) -> int:
        """Time to spare if its prefill went on alone from now; negative if the deadline will be missed."""
        return self.arrival_ns + self.relative_deadline_ns(multiplier_ppm, min_deadline_ns) - now_ns - self.remaining_ns


class StepLoad(StepShape, kw_only=True):
    """What the step being formed holds so far.

    `now_ns` is the time of the plan, `budget_tokens` the most tokens that the step may hold (0: not given). In a
    pipeline `rest_tokens` is what the prompt that a chunk is asked for has left, to be shared evenly by its chunks (0:
    one stage).
    """

    now_ns: int = 0
    budget_tokens: int = 0
    rest_tokens: int = 0
    decode_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens in the step."""
        return self.decode_tokens + self.prefill_tokens

    def predicted_ns(self, predictor: Predictor, start: int = 0, num_tokens: int = 0) -> int:
        """Predicted duration of the step as it stands, or with one more chunk of `num_tokens` after `start`."""
        taken_ps = predictor.step_ps(self) + predictor.chunk_ps(start, num_tokens)
        return taken_ps // PICOSECONDS_PER_NANOSECOND

    def largest_chunk(self, predictor: Predictor, target_ns: int, start: int, max_tokens: int) -> int:
        """Most tokens after `start`, from 0 to `max_tokens`, with which the step is predicted to take at most
        `target_ns`; of a pipeline less, so that all chunks of the prompt take equally long. Its stages wait for the
        longest, so two alike are through sooner than a long and a short one.
        """
        if self.rest_tokens:
            target_ns = self._even_target_ns(predictor, target_ns, start)
        taken_ps = predictor.step_ps(self) + predictor.chunk_ps(start, 0)
        # A predicted time is rounded down to whole nanoseconds.
        spare_ps = (target_ns + 1) * PICOSECONDS_PER_NANOSECOND - 1 - taken_ps
        return predictor.tokens_within(spare_ps, start, max_tokens)

    def _even_target_ns(self, predictor: Predictor, target_ns: int, start: int) -> int:
        least_ns = self.predicted_ns(predictor, start)
        chunks_ns = self.predicted_ns(predictor, start, self.rest_tokens) - least_ns
        if not 0 < target_ns - least_ns < chunks_ns:
            return target_ns
        return least_ns + ceil_div(chunks_ns, ceil_div(chunks_ns, target_ns - least_ns))


class RequestView(Struct, frozen=True):
    """A request that needs a replica. `ordinal` counts the requests routed before it. `session`: the conversation that
    it belongs to, 0: none.
    """

    request: int
    ordinal: int
    num_sequences: int
    num_tokens: int
    session: int = 0


class ReplicaView(Struct, frozen=True):
    """A replica whose worker is up. Tokens are prompt tokens, with kept output after a preemption.

    `prefix_tokens` is how much of this request's prompt, in whole blocks, the replica's cache holds or will hold once
    it has computed what waits there; 0 for a router without `reads_prefixes`. Of a backend: `limit` is how many
    requests it may have at once (0: an own worker); `weight_ppm` its share of the load, by which its tokens are divided
    already.
    """

    index: int
    num_waiting: int
    num_running: int
    waiting_tokens: int
    admitted_tokens: int
    available_blocks: int
    prefix_tokens: int = 0
    limit: int = 0
    weight_ppm: int = 1_000_000


class ReplicaViews(Seq[ReplicaView]):
    """The replicas of a set whose workers are up, in order of their indices. A view is made when it is asked for, so a
    router that asks for few costs the same with a thousand replicas as with ten.
    """

    @abstractmethod
    def contenders(self, first: int) -> list[int]:
        """Positions of the replicas of which one is the best for any router to which only load (`admitted_tokens` and
        `waiting_tokens`) and `prefix_tokens` count: of each length of the prefix the one with the least load. Of equals
        the first in turn from position `first` on, which is taken modulo their number.
        """

    @abstractmethod
    def home_of(self, session: int) -> int:
        """Position of the replica to which a session belongs: always the same while that is up, and when a replica
        goes, only its own sessions move. Backends have sessions in proportion to their weights.
        """


def contenders(replicas: Seq[ReplicaView], first: int) -> Seq[int]:
    """The same of any sequence of views: where it is a plain one, all positions."""
    return replicas.contenders(first) if isinstance(replicas, ReplicaViews) else range(len(replicas))


def home_of(replicas: Seq[ReplicaView], session: int) -> int:
    """`ReplicaViews.home_of` of any sequence of views."""
    if isinstance(replicas, ReplicaViews):
        return replicas.home_of(session)
    return rendezvous(session, [each.index for each in replicas], [each.weight_ppm for each in replicas])


class Policy(Struct, frozen=True, kw_only=True):
    """Orders sequences: a smaller key is more urgent, within one `priority`; ties go to the earlier arrival.

    `static` says that a sequence's key never changes; then it is asked for once. `reads_prefixes` asks for the
    `cached_tokens` of waiting sequences, on their replica or, where any may take them, the best one; that costs a look
    into the caches for each of them in each round. A static policy has no rounds, so it gets none.
    """

    static: ClassVar[bool] = False
    reads_prefixes: ClassVar[bool] = False
    version: ClassVar[str] = "1"

    def keys(self, sequences: Seq[SequenceView], now_ns: int) -> list[int]:
        """One integer for each sequence. By default the arrival."""
        return [sequence.arrival_ns for sequence in sequences]

    def eviction_margin(self) -> int | None:
        """By how much a waiting sequence's key must undercut a running one's to evict it; None: never."""
        return None


class Batcher(Struct, frozen=True, kw_only=True):
    """Sizes prefill chunks."""

    version: ClassVar[str] = "1"

    def chunk_tokens(self, load: StepLoad, sequence: SequenceView, max_tokens: int, predictor: Predictor) -> int:
        """Tokens of the sequence's next chunk, from 0 (not in this step) to `max_tokens`. By default all of them."""
        return max_tokens


class Router(Struct, frozen=True, kw_only=True):
    """Chooses a replica for a request.

    `reads_prefixes` asks for each view's `prefix_tokens`: names of blocks are counted then, and looked up.
    """

    version: ClassVar[str] = "1"
    reads_prefixes: ClassVar[bool] = False

    def route(self, request: RequestView, replicas: Seq[ReplicaView]) -> int | None:
        """The index of one of `replicas` (never empty), or None to leave it to the first replica with room. They are
        `ReplicaViews`: a router that does not look at each should ask for their `contenders`.
        """
        return None


def milliseconds_to_ns(milliseconds: float) -> int:
    """A parameter in milliseconds as integer nanoseconds, by its shortest decimal form."""
    return parts_per_million(milliseconds)
