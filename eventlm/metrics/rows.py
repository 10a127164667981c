"""Rows of single sequences and steps. The metrics store makes them for a sink and keeps none itself."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from msgspec import Struct

from eventlm.types import FinishReason

#: Ends of sequences that ran to their end; the others were cut short.
COMPLETED: frozenset[str] = frozenset({"eos", "stop_token", "grammar", "stop", "tool_calls", "length", "complete"})

#: Ends that are not of the engine's making.
CANCELLED: frozenset[str] = frozenset({"cancelled", "front_end_lost"})


#: The reason of a row that was asked for before the sequence ended.
UNFINISHED = "unfinished"


class RequestRow(Struct, frozen=True, kw_only=True):
    """A sequence that has ended, or an unfinished one as it was at `finished_ns`. Times in ns; None: not reached.

    For their meaning see `eventlm.metrics.aggregates`. met_deadline: of the request's own deadline for the
    first token; None: it has none, or was cancelled before it. met_slo: of the objectives that the request brought.
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
    met_deadline: bool | None = None
    met_slo: bool | None = None

    @property
    def edge_ns(self) -> int:
        """From the request's reception to its arrival at the scheduler."""
        return self.request_e2e_time - (self.finished_ns - self.arrived_ns)

    @property
    def is_complete(self) -> bool:
        """Whether it ran to its end."""
        return self.reason in COMPLETED


class StepRow(Struct, frozen=True, kw_only=True):
    """A completed step.

    tokens: (request, index) of each token that it showed. token_gaps: (ns between two tokens of a sequence, in how many
    rows).
    """

    replica: int
    step: int
    completed_ns: int
    batch_size: int
    batch_num_tokens: int
    batch_execution_time: int
    predicted_ns: int
    inter_batch_delay: int | None
    tokens: list[tuple[int, int]]
    token_gaps: list[tuple[int, int]]

    @property
    def started_ns(self) -> int:
        """When the worker began it, to within the time that its result took to arrive."""
        return self.completed_ns - self.batch_execution_time


class Gauges(NamedTuple):
    """A replica at one moment: sequences on it, sequences waiting (for any replica: under the first), blocks held."""

    num_running: int
    num_waiting: int
    num_held_blocks: int


class MetricsSink(Protocol):
    """Gets rows as they come about."""

    def request_ended(self, row: RequestRow) -> None:
        """A sequence has ended."""
        ...

    def step_completed(self, row: StepRow) -> None:
        """A step has completed."""
        ...
