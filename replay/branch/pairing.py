"""Each sequence of a branch beside the same one of the recorded run."""

from __future__ import annotations

from msgspec import Struct

from eventlm.metrics.rows import COMPLETED
from eventlm.replay.outcome import SequenceOutcome
from eventlm.replay.what_if.compare import Ran
from eventlm.replay.workload.workload import Workload


class PairedOutcome(Struct, frozen=True, kw_only=True):
    """How a sequence went from the point of the branch on. Times in ns since its reception; None: not reached, or
    before the point. num_preemptions: from there on.
    """

    reason: str
    ttft_ns: int | None
    e2e_ns: int
    output_tokens: int
    num_preemptions: int


class RequestPair(Struct, frozen=True, kw_only=True):
    """A sequence in both runs; None where it did not end. request: seq of its arrival in the recorded run;
    branch_request: in the branch, None if it did not arrive there or did not end.
    """

    request: int
    index: int
    branch_request: int | None
    prompt_tokens: int
    recorded: PairedOutcome | None
    branch: PairedOutcome | None

    @property
    def e2e_difference_ns(self) -> int | None:
        """How much later it ended in the branch; None if it did not run to its end in both."""
        if self.recorded is None or self.branch is None:
            return None
        if self.recorded.reason not in COMPLETED or self.branch.reason not in COMPLETED:
            return None
        return self.branch.e2e_ns - self.recorded.e2e_ns


def pair_requests(work: Workload, recorded: Ran, branched: Ran) -> list[RequestPair]:
    """All sequences that ended in at least one of two runs of a work, in the order of their recorded arrivals."""
    before, after = _by_place(recorded), _by_place(branched)
    return [
        RequestPair(
            request=work.requests[place].s,
            index=index,
            branch_request=after[place, index].request if (place, index) in after else None,
            prompt_tokens=work.requests[place].arrival.prompt_tokens,
            recorded=_paired(before.get((place, index))),
            branch=_paired(after.get((place, index))),
        )
        for place, index in sorted({*before, *after}, key=lambda key: (work.requests[key[0]].s, key[1]))
    ]


def _by_place(ran: Ran) -> dict[tuple[int, int], SequenceOutcome]:
    return {(ran.indices[each.request], each.index): each for each in ran.outcome.sequences}


def _paired(found: SequenceOutcome | None) -> PairedOutcome | None:
    if found is None:
        return None
    return PairedOutcome(
        reason=found.reason,
        ttft_ns=found.ttft_ns,
        e2e_ns=found.e2e_ns,
        output_tokens=found.output_tokens,
        num_preemptions=found.num_preemptions,
    )
