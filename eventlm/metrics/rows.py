"""Rows of single sequences and steps, which the metrics store makes for a sink. It keeps none itself."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, Protocol

from msgspec import Struct

from eventlm.types import FinishReason, SequenceId

#: Finish reasons of sequences that ran to their end. The others were cut short.
COMPLETED: frozenset[str] = frozenset({"eos", "stop_token", "grammar", "stop", "tool_calls", "length", "complete"})

#: Finish reasons that the engine did not cause.
CANCELLED: frozenset[str] = frozenset({"cancelled", "front_end_lost"})

#: The reason of a row of a sequence that has not ended.
UNFINISHED: Final = "unfinished"


class RequestRow(Struct, frozen=True, kw_only=True):
    """A sequence that has ended, or an unfinished one as it was at `finished_ns`. Times in ns; None: not reached.

    `eventlm.metrics.histograms` describes them. A forwarded sequence has the token counts of its server, where that has
    some, and its waits between attempts count as those after preemptions. met_deadline: of the request's own deadline
    for the first token; None: it has none, or was cancelled before it. met_slo: of the objectives that the request
    brought. is_branch: it belongs to a beam search whose first request stands for all of them in what counts requests.
    """

    request: int
    index: int
    replica: int
    reason: FinishReason | Literal["unfinished"]
    arrived_ns: int
    finished_ns: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    request_e2e_time: int
    request_scheduling_delay: int | None = None
    request_execution_time: int | None = None
    request_preemption_time: int | None = None
    request_prefill_time: int | None = None
    request_decode_time: int | None = None
    request_inference_time: int | None = None
    request_time_per_output_token: int | None = None
    prefill_e2e_time: int | None = None
    request_num_preemptions: int = 0
    request_num_restarts: int = 0
    service_class: str = ""
    is_branch: bool = False
    met_deadline: bool | None = None
    met_slo: bool | None = None

    @property
    def edge_ns(self) -> int:
        """From the request's reception to its arrival at the scheduler."""
        return self.request_e2e_time - (self.finished_ns - self.arrived_ns)

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not in the prefix cache."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def is_complete(self) -> bool:
        """Whether it ran to its end."""
        return self.reason in COMPLETED

    @property
    def was_left(self) -> bool:
        """Whether its client left after the first token."""
        return self.reason in CANCELLED and self.prefill_e2e_time is not None


class StepRow(Struct, frozen=True, kw_only=True):
    """A completed step.

    batch_execution_time: from the start to the end, in a pipeline through all stages; busy_ns: what it kept the
    replica from other steps, there the time of its slowest stage, which is what was predicted.
    tokens: (request, index) of each token that it showed. token_gaps: (ns between two tokens of a sequence, in how many
    rows). stages: of a pipeline, the (start_ns, end_ns) of each; stage_waits_ns: how long the step waited for each that
    computed another one. loads: of several KV groups, the tokens of each.
    """

    replica: int
    step: int
    completed_ns: int
    batch_size: int
    batch_num_tokens: int
    batch_execution_time: int
    busy_ns: int
    predicted_ns: int
    inter_batch_delay: int | None
    tokens: list[tuple[int, int]]
    token_gaps: list[tuple[int, int]]
    stages: list[tuple[int, int]] = []
    stage_waits_ns: list[int] = []
    loads: list[int] = []

    @property
    def started_ns(self) -> int:
        """When the worker began it, later by the time that its result took to arrive."""
        return self.completed_ns - self.batch_execution_time


class RelayedTokens(NamedTuple):
    """Tokens of one sequence that another server sent at once. gap_ns: since those before them; None: they are the
    first, or came with the end.
    """

    relayed_ns: int
    replica: int
    request: int
    index: int  # type: ignore[assignment]  # hides tuple.index on purpose
    num_tokens: int
    gap_ns: int | None


class Gauges(NamedTuple):
    """A replica at one moment: sequences on it, sequences waiting (for any replica: under the first), blocks held, and
    of several KV groups those of each.
    """

    num_running: int
    num_waiting: int
    num_held_blocks: int
    group_held_blocks: tuple[int, ...] = ()


class MetricsSink(Protocol):
    """Gets each row as soon as it is made."""

    def request_ended(self, row: RequestRow) -> None:
        """A sequence has ended."""
        ...

    def step_completed(self, row: StepRow) -> None:
        """A step has completed."""
        ...

    def tokens_relayed(self, row: RelayedTokens) -> None:
        """Another server sent tokens that count."""
        ...


class EndedRows:
    """A sink that keeps the rows of the sequences that ended last, for outputs that report the end and for queries."""

    def __init__(self, *, max_rows: int = 16_384) -> None:
        self._max_rows = max_rows
        #: The oldest first.
        self._rows: dict[tuple[int, int], RequestRow] = {}

    def request_ended(self, row: RequestRow) -> None:
        """Keep it until there are too many."""
        self._rows[row.request, row.index] = row
        if len(self._rows) > self._max_rows:
            del self._rows[next(iter(self._rows))]

    def step_completed(self, row: StepRow) -> None:
        """Steps are not kept."""

    def tokens_relayed(self, row: RelayedTokens) -> None:
        """Nor are tokens."""

    def find(self, identity: SequenceId) -> RequestRow | None:
        """The row of a sequence; None if it has not ended, ended long ago, or was not measured."""
        return self._rows.get(identity)
