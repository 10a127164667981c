"""A workload: requests in a form that any engine can serve, under any policy.

Everything with a cause is relative to its cause: a cancel to the token before it, a text end to the token in which it
was found, a turn of a conversation to the end of the turn before. So a workload taken from a slow run is not slow
itself. Outputs are part of the workload; policies do not see them.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, structs

from eventlm.config import CoreConfig
from eventlm.errors import UsageError
from eventlm.events import Arrived, Fact
from eventlm.replay.workload.incidents import sped_up
from eventlm.types import WorkerEnd

#: Larger than any position of an output.
NEVER = 1 << 62

#: A number of tokens, a time in ns, or the seq of a fact. A workload file may come from anyone.
Count = Annotated[int, Meta(ge=0, le=NEVER)]


class TextEnd(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The text of the first `position` output tokens has an end, which is reported `delay_ns` after them.

    Here and below, `s` is the seq of the fact in the recorded run, else 0.
    """

    position: Count
    reason: str
    delay_ns: Count
    s: Count = 0


class SequenceOutput(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one sequence generates, whatever the schedule. Positions count output tokens.

    worker_end: the position at which the worker ends it, for `worker_reason`; NEVER: it reaches max_tokens.
    answer_delay_ns: from `closing` to its text end; None: unknown. blocks: names of the blocks that it fills, as far as
    known. reason, num_tokens: how it ended in the recorded run, else "".
    seen_tokens: recorded tokens of a sequence whose length is unknown because it was rejected, cut short or unfinished;
    `eventlm.replay.workload.unknown` draws the rest. None: the length is known.
    """

    worker_end: Count = NEVER
    worker_reason: WorkerEnd = "eos"
    text_end: TextEnd | None = None
    answer_delay_ns: Count | None = None
    answer_s: Count = 0
    blocks: list[Count] = []
    reason: str = ""
    num_tokens: Count = 0
    seen_tokens: Count | None = None


class Cancel(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The client leaves `delay_ns` after output token `position`, counted from 1, of sample `index`."""

    index: Count
    position: Count
    delay_ns: Count
    reason: str = "client"
    s: Count = 0


class Patience(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The client leaves `limit_ns` after the arrival if no sample has a token by then."""

    limit_ns: Count
    reason: str = "client"
    s: Count = 0


class WorkloadRequest(Struct, frozen=True, kw_only=True):
    """One request. `arrival`: its fact, except for seq and time; blocks have the workload's size.

    arrival_ns: on the workload's time axis. received_before_ns, ready_before_ns: from its reception, and from the end
    of tokenizing, to its arrival. parent: the index of the request whose end it waits for, else -1. think_ns: from that
    end to its arrival; None: not before that end, and not before `arrival_ns`.
    grammar_delay_ns: from its arrival until its grammar was built, or failed with `grammar_error`.
    waited_ns: how long the client of the recorded run waited for a first token or a rejection. is_unfinished: that run
    does not contain its end.
    s: its seq in the recorded run, else 0; `grammar_s` likewise. block_size: of its blocks, in tokens; 0: the
    workload's.
    """

    arrival: Arrived
    arrival_ns: int
    outputs: list[SequenceOutput]
    received_before_ns: int = 0
    ready_before_ns: int = 0
    patience: Patience | None = None
    cancel: Cancel | None = None
    parent: int = -1
    think_ns: int | None = None
    grammar_delay_ns: int = 0
    grammar_error: str = ""
    grammar_s: int = 0
    waited_ns: int = 0
    is_unfinished: bool = False
    s: int = 0
    block_size: int = 0

    @property
    def has_unknown_length(self) -> bool:
        """Whether the length of one of its sequences is unknown."""
        return any(output.seen_tokens is not None for output in self.outputs)


class Workload(Struct, frozen=True, kw_only=True):
    """Requests in order of arrival. Members of a group are adjacent and arrive at the same time.

    block_size: of the blocks in the arrivals, in tokens; 0: there are none. Their names count from 1. first_free_name:
    larger than all of them. incidents: what came from outside and belongs to no request, in order, on the same time
    axis. recorded: the limits of each replicaset of the engine that the workload is from, by its name; empty: it is
    from none.
    """

    source: str
    requests: list[WorkloadRequest]
    block_size: int = 0
    first_free_name: int = 1
    incidents: list[Fact] = []
    recorded: dict[str, CoreConfig] = {}

    @property
    def duration_ns(self) -> int:
        """From the first arrival to the last."""
        return self.requests[-1].arrival_ns - self.requests[0].arrival_ns if self.requests else 0

    def groups(self) -> list[range]:
        """Indices of the members of each group."""
        found = []
        index = 0
        while index < len(self.requests):
            size = self.requests[index].arrival.group_size
            found.append(range(index, index + size))
            index += size
        return found

    def sped_up(self, factor_ppm: int) -> Workload:
        """The same with arrivals closer together by a factor in parts per million. Think times and outages stay.

        Raises UsageError for a factor that is not positive.
        """
        if factor_ppm <= 0:
            raise UsageError(f"arrivals cannot be sped up by {factor_ppm / 1e6}: a positive factor is needed")
        if not self.requests or factor_ppm == 1_000_000:
            return self
        first_ns = self.requests[0].arrival_ns
        requests = [
            structs.replace(request, arrival_ns=first_ns + (request.arrival_ns - first_ns) * 1_000_000 // factor_ppm)
            for request in self.requests
        ]
        incidents = sped_up(self.incidents, first_ns=first_ns, factor_ppm=factor_ppm)
        return structs.replace(self, requests=requests, incidents=incidents)


def resize_blocks(blocks: list[int], *, from_size: int, to_size: int, num_tokens: int) -> list[int]:
    """Names of a prompt's full blocks of `to_size` tokens, given those of its blocks of `from_size`.

    A name stands for its block and everything before it; so do the new names. Equal prompts get equal names. The last
    given block may be partial; the full smaller blocks in it are named after it. A larger block is named after its last
    part. 0, no name, stays 0. Raises UsageError if neither size divides the other.
    """
    num_full = num_tokens // to_size
    if not blocks or from_size == to_size:
        return blocks[:num_full]
    if from_size % to_size == 0:
        parts = from_size // to_size
        return [name and name * parts + part + 1 for name in blocks for part in range(parts)][:num_full]
    if to_size % from_size == 0:
        return [name and name + 1 for name in blocks[to_size // from_size - 1 :: to_size // from_size]][:num_full]
    raise UsageError(
        f"the workload's blocks hold {from_size} tokens and the engine's {to_size}: one must be a multiple of the other"
    )


def resize_request(request: WorkloadRequest, *, from_size: int, to_size: int) -> WorkloadRequest:
    """A request with the full blocks of its prompt and its outputs as `resize_blocks` names them."""
    arrival, outputs = request.arrival, request.outputs
    blocks = resize_blocks(arrival.blocks, from_size=from_size, to_size=to_size, num_tokens=arrival.prompt_tokens)
    if from_size != to_size and any(output.blocks for output in outputs):
        # An output's blocks follow the full blocks of its prompt.
        full = arrival.blocks[: arrival.prompt_tokens // from_size]
        named = [
            resize_blocks([*full, *output.blocks], from_size=from_size, to_size=to_size, num_tokens=NEVER)
            for output in outputs
        ]
        outputs = [
            structs.replace(output, blocks=names[len(blocks) :]) for output, names in zip(outputs, named, strict=True)
        ]
    return structs.replace(request, arrival=structs.replace(arrival, blocks=blocks), outputs=outputs)
