"""The story of a request, so far or whole: what `eventlm explain` tells, from the index's nearest state on."""

from __future__ import annotations

from eventlm.bus.log_reader import LogLine, LogReader
from eventlm.errors import UsageError
from eventlm.replay.debugger.interrupt import Interrupt
from eventlm.replay.debugger.lines import lines_between
from eventlm.replay.explain.explainer import Explainer
from eventlm.replay.explain.result import Explanation
from eventlm.replay.index.index import Index
from eventlm.replay.verify.divergence_error import DivergenceError
from eventlm.replay.verify.verifier import Found, Verifier
from eventlm.types import SequenceId


def explain_until(index: Index, request: int, sample: int, last_s: int, interrupt: Interrupt) -> Explanation:
    """The explanation of a sequence up to the drain of event `last_s`, or to its end if that is earlier.

    Raises UsageError if it had not arrived by then, and where the run was not verified.
    """
    if index.rebuilt is None:
        raise UsageError(index.facts.missing)
    if request > last_s:
        raise UsageError(f"request {request} had not arrived by event {last_s:,}; `story {request} whole` is all of it")
    start = index.snapshot_before(request)
    core = None if start is None else index.rebuilt.restored_core(start.state())
    explainer = Explainer(Verifier(index.rebuilt, index.header, core=core), {request: [sample]})
    drain = index.drain_of(last_s)
    end_s = int(index.drains["next_s"][drain]) if drain < len(index.drains) else index.facts.next_s
    interrupt.expect(end_s - (index.facts.first_s if core is None else core.next_seq))
    line: LogLine | None = None
    with LogReader(index.path) as reader:
        try:
            for line in lines_between(reader, index.header.s if core is None else core.next_seq, end_s - 1):
                if explainer.is_done:
                    break
                interrupt.check()
                explainer.feed(line)
        except Found as found:
            assert line is not None
            raise DivergenceError.at(
                reader.path, line, found, index.rebuilt.drift, "an explanation would be wrong"
            ) from found
    explainer.end()
    explanation = explainer.found.get(SequenceId(request, sample)) or explainer.found.get(SequenceId(request, 0))
    if explanation is None:
        raise UsageError(f"of request {request} nothing is decided yet at event {last_s:,}")
    return explanation
