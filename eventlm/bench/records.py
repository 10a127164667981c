"""The requests of a load test, and what was measured of each.

Latencies are defined as in `vllm bench serve`: TTFT is the time to the first token, e2e the time to the last, TPOT is
(e2e - TTFT) / (output tokens - 1), and the inter-token latencies are the times between events that bring text. They
count from the time at which a request was meant to be sent, which in an open loop is that of its arrival: a client or a
server that holds requests back does not make them look faster.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from msgspec import Struct

#: The `error` of a request that Ctrl-C ended.
INTERRUPTED = "interrupted"

Messages = list[dict[str, Any]]


class LoadRequest(Struct, frozen=True):
    """One request of a load test. `arrival_ns`: after the start; None in a closed loop, as soon as there is a slot.

    `prompt_tokens` is the intended length; None for a prompt from a file, whose tokens were not counted.
    """

    index: int
    body: dict[str, Any]
    arrival_ns: int | None = None
    prompt_tokens: int | None = None


class RequestRecord(Struct):
    """What was measured of one request. Times are after the start; `token_times_ns` has one for each event with text.

    `output_tokens` is the server's count, else that of the events with text (`counted_by_server` False). `error` is
    empty for a success, else its kind, such as `http 429`; `retried` has the kinds of attempts that failed before the
    last. `sent_ns` is the time of the first. `rank` is the process that sent it. `post_kernel_ns` is the time of the
    kernel behind the answer, None without one, or if it was dropped.
    """

    index: int
    intended_ns: int
    sent_ns: int
    end_ns: int = 0
    token_times_ns: list[int] = []
    prompt_tokens: int | None = None
    output_tokens: int = 0
    counted_by_server: bool = False
    finish_reason: str = ""
    error: str = ""
    message: str = ""
    retried: list[str] = []
    rank: int = 0
    post_kernel_ns: int | None = None

    @property
    def is_success(self) -> bool:
        return not self.error

    @property
    def ttft_ns(self) -> int:
        """Time to the first event with text, or to the end where none had any."""
        return (self.token_times_ns[0] if self.token_times_ns else self.end_ns) - self.intended_ns

    @property
    def e2e_ns(self) -> int:
        """Time to the last event."""
        return self.end_ns - self.intended_ns

    @property
    def tpot_ns(self) -> float | None:
        """Time per output token after the first; None where there is only one."""
        return (self.e2e_ns - self.ttft_ns) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def inter_token_ns(self) -> list[int]:
        """Times between consecutive events with text."""
        return [later - earlier for earlier, later in pairwise(self.token_times_ns)]


class LoadResult(Struct):
    """Everything that was sent, in the order of the sends. Times are after the start.

    `server_gone` is the last error of a load that was ended because the server no longer answered; `interrupted` says
    that a signal ended it. `cpu_ns` is the processor time of the client, of the busiest one where there are several.
    """

    records: list[RequestRecord]
    duration_ns: int
    cpu_ns: int
    interrupted: bool = False
    server_gone: str = ""
