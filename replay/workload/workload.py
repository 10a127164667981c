"""A workload: what asks an engine for work, told so that any engine can be asked for it, under any policy.

Everything that happens *because* of something is told relative to it: a cancel to the token after which it came, a text
end to the token in which it was found, a turn of a conversation to the end of the turn before. So a workload taken from
a run that was slow is not slow itself. What a sequence will produce is its fate; no policy ever sees it.
"""

from __future__ import annotations

from msgspec import Struct, structs

from eventlm.errors import UsageError
from eventlm.events import Arrived
from eventlm.types import FinishReason, WorkerEnd

#: No position of an output is that large.
NEVER = 1 << 62


class TextEnd(Struct, frozen=True, kw_only=True):
    """The edge finds an end in a sequence's text behind `position` output tokens, and says so `delay_ns` after them.

    Here and below `s` is the position of the fact in the run that it was taken from, else 0.
    """

    position: int
    reason: str
    delay_ns: int
    s: int = 0


class Fate(Struct, frozen=True, kw_only=True):
    """What becomes of one sequence, whatever the schedule. Positions count output tokens.

    worker_end: behind the token at which position its worker sees an end, for `worker_reason`; NEVER: it goes on to
    max_tokens. answer_delay_ns: how long its edge takes to answer `closing`; None: nobody has seen that. blocks: the
    names of the blocks that its output fills, as far as they are known. reason, num_tokens: how it ended where it was
    seen, "" if it was not.
    seen_tokens: so many tokens were seen of a sequence whose length is not known because it was rejected, cut short or
    unfinished; `eventlm.replay.workload.unknown` draws the rest. None: its length is known.
    """

    worker_end: int = NEVER
    worker_reason: WorkerEnd = "eos"
    text_end: TextEnd | None = None
    answer_delay_ns: int | None = None
    answer_s: int = 0
    blocks: list[int] = []
    reason: FinishReason | str = ""
    num_tokens: int = 0
    seen_tokens: int | None = None


class Cancel(Struct, frozen=True, kw_only=True):
    """A client leaves `delay_ns` after output token `position`, counted from 1, of its sample `index`."""

    index: int
    position: int
    delay_ns: int
    reason: str = "client"
    s: int = 0


class Patience(Struct, frozen=True, kw_only=True):
    """A client leaves `limit_ns` after the arrival unless the first token of any sample has come."""

    limit_ns: int
    reason: str = "client"
    s: int = 0


class WorkloadRequest(Struct, frozen=True, kw_only=True):
    """One request. `arrival` is its fact but for place and time; its blocks are of the workload's own size.

    arrival_ns: on the workload's axis. received_before_ns, ready_before_ns: how long before its arrival its socket was
    accepted and its prompt tokenized. parent: the place, in the workload, of the request whose end it waits for, else
    -1. think_ns: how long after that end it comes; None: not before that end, and not before `arrival_ns`.
    grammar_delay_ns: from its arrival to its matcher, which is `grammar_error` if that failed.
    waited_ns: how long its client waited for a first token in the run that it was taken from, or for its rejection.
    is_unfinished: that run does not show its end.
    s: its seq in the run that it was taken from, else 0; `grammar_s` likewise.
    """

    arrival: Arrived
    arrival_ns: int
    fates: list[Fate]
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

    @property
    def has_unknown_length(self) -> bool:
        """Whether the length of one of its sequences is not known."""
        return any(fate.seen_tokens is not None for fate in self.fates)


class Workload(Struct, frozen=True, kw_only=True):
    """Requests in the order of their arrival. Members of a group follow each other and arrive at one time.

    block_size: of the blocks in the arrivals, in tokens; 0: none has any. Their names count from 1. first_free_name:
    larger than all of them.
    """

    source: str
    requests: list[WorkloadRequest]
    block_size: int = 0
    first_free_name: int = 1

    @property
    def duration_ns(self) -> int:
        """From the first arrival to the last."""
        return self.requests[-1].arrival_ns - self.requests[0].arrival_ns if self.requests else 0

    def groups(self) -> list[range]:
        """Places of the members of each group."""
        found = []
        place = 0
        while place < len(self.requests):
            size = self.requests[place].arrival.group_size
            found.append(range(place, place + size))
            place += size
        return found

    def sped_up(self, factor_ppm: int) -> Workload:
        """The same with arrivals closer together by a factor in parts per million; people think no faster.

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
        return structs.replace(self, requests=requests)


def resize_blocks(blocks: list[int], *, from_size: int, to_size: int, num_tokens: int) -> list[int]:
    """Names of a prompt's full blocks of `to_size` tokens, given those of its blocks of `from_size`.

    The last given block may be partial; its name stands for what it holds, so the full smaller blocks in it get names
    of their own from it. Where blocks become larger, a name stands for the whole path, as that of its last part does.
    A name that stands for everything before it leads to others that do, and equal prompts to equal names; 0, which is
    none, to 0.
    Raises UsageError if neither size divides the other.
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
    arrival, fates = request.arrival, request.fates
    blocks = resize_blocks(arrival.blocks, from_size=from_size, to_size=to_size, num_tokens=arrival.prompt_tokens)
    if from_size != to_size and any(fate.blocks for fate in fates):
        # What a sequence fills goes on behind the full blocks that its prompt has names for.
        full = arrival.blocks[: arrival.prompt_tokens // from_size]
        named = [
            resize_blocks([*full, *fate.blocks], from_size=from_size, to_size=to_size, num_tokens=NEVER)
            for fate in fates
        ]
        fates = [structs.replace(fate, blocks=names[len(blocks) :]) for fate, names in zip(fates, named, strict=True)]
    return structs.replace(request, arrival=structs.replace(arrival, blocks=blocks), fates=fates)
