"""Types and units that every layer shares."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Context, Decimal, InvalidOperation
from functools import lru_cache
from typing import Literal, NamedTuple

NANOSECONDS_PER_MILLISECOND = 1_000_000
#: Why an engine has ended that handed over to the next one, as the log has it.
RESTART = "restart"
NANOSECONDS_PER_SECOND = 1_000_000_000

#: Called now and then, on long work, with how much of it is done and how much there is: bytes of a file, or a count.
OnProgress = Callable[[int, int], None]

#: Who computes a model: eventlm's own forward passes, transformers, or transformers where eventlm does not know it.
ModelImpl = Literal["auto", "eventlm", "transformers"]

PluginKind = Literal["policy", "batcher", "router"]

#: What a request wants: tokens, the log-probabilities of its prompt, or a pooled embedding.
RequestKind = Literal["generate", "score", "pool"]
#: Why a request is answered by another model than it asked for.
ModelRoute = Literal["", "fallback", "canary", "shadow"]

#: Why a sequence ended. `eos`, `stop_token`, `grammar` come from the worker, `stop` and `tool_calls` from the text,
#: `length`, `complete` (score, pool) and `deadline` from the core, `cancelled` and `front_end_lost` from outside.
#: `error` is the core's word on a sequence that kills workers, and a worker's on a grammar that cannot be followed.
FinishReason = Literal[
    "eos",
    "stop_token",
    "grammar",
    "stop",
    "tool_calls",
    "length",
    "complete",
    "deadline",
    "cancelled",
    "front_end_lost",
    "error",
]

#: Ends that a worker can see.
WorkerEnd = Literal["eos", "stop_token", "grammar", "error"]

#: Its own, because anybody in the process may change the thread's.
_CONTEXT = Context(prec=40)


class SequenceId(NamedTuple):
    """A sequence: the seq of its request's arrival event, and which of the request's `n` samples it is."""

    request: int
    index: int  # type: ignore[assignment]  # hides tuple.index on purpose


class TimeWindow(NamedTuple):
    """A part of a run: from `from_ns` to before `to_ns`, in ns of the run; None: to its end."""

    from_ns: int
    to_ns: int | None

    def has(self, ns: int) -> bool:
        """Whether a moment lies in it."""
        return self.from_ns <= ns and (self.to_ns is None or ns < self.to_ns)

    def overlaps(self, start_ns: int, end_ns: int) -> bool:
        """Whether any of the time from `start_ns` to `end_ns` lies in it."""
        return self.from_ns <= end_ns and (self.to_ns is None or start_ns < self.to_ns)


@lru_cache(maxsize=1024, typed=True)
def parts_per_million(value: float | str) -> int:
    """`value` as an integer number of millionths, exactly as its shortest decimal form reads.

    Raises ValueError for what is not a finite decimal number.
    """
    try:
        scaled = _CONTEXT.multiply(Decimal(str(value)), Decimal(1_000_000))
        return int(scaled.to_integral_value(context=_CONTEXT))
    except (InvalidOperation, OverflowError, ValueError) as error:
        raise ValueError(f"{value!r} is not a finite decimal number") from error


def ceil_div(numerator: int, denominator: int) -> int:
    """The smallest integer not below numerator / denominator, for a positive denominator."""
    return -(-numerator // denominator)
