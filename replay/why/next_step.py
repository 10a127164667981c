"""When a sequence that waits is next in a step, and in which drain that was decided: a search in the lines that follow.

Only lines that may name the sequence are decoded, so that far ones are found as fast as lines are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import dropwhile

from msgspec import Struct

from eventlm.bus.log_reader import LogLine, LogReader
from eventlm.events import Closing, Fact, Finished, Forwarded, Launched, Preempted
from eventlm.events.codec import DECISION_TAGS, FACT_TAGS
from eventlm.replay.explain.timeline import rows_of
from eventlm.types import SequenceId

#: Lines that are looked at. An hour of a busy engine has half a million.
MAX_LINES = 2_000_000
_IS_MARKED = re.compile(rb'\{"t":"\w+","s":\d+,"ts":\d+(?:,"c":\d+)?,"p":1')


class Departure(Struct, frozen=True, kw_only=True):
    """A sequence that ended, or was preempted, in a drain before the step was formed.

    num_blocks: of its own that it gave back, as far as it is known.
    """

    sequence: SequenceId
    how: str
    num_blocks: int | None = None


class NextStep(Struct, frozen=True, kw_only=True):
    """The first launch with a row of the sequence, or its end, if that came before. Of one for other servers the first
    time that it is sent to one, which is `replica`; then `step` is -1.

    ended: the reason of its end, "" if it is in a step; then the step's fields are as of the launch, num_tokens is the
    length of its chunk, 0 for a decode. s, ts: of that decision.
    fact_s, fact: the last fact of the drain, on which the step was planned; first_s: the drain's first fact.
    departures: who left in that drain before that, in order.
    """

    request: int
    index: int
    s: int
    ts: int
    ended: str = ""
    replica: int = -1
    step: int = -1
    num_tokens: int = 0
    fact_s: int
    fact: str
    first_s: int
    departures: list[Departure] = []


def find_next_step(
    reader: LogReader,
    s: int,
    request: int,
    index: int,
    *,
    max_lines: int = MAX_LINES,
    check: Callable[[], None] = lambda: None,
) -> NextStep | None:
    """The next step of a sequence; None if the log ends first, or `max_lines` lines have none.

    The search begins after the decisions of the drain that has ended at event `s`: they belong to the state there.
    check: called for every line, and may raise to end the work. Raises as LogReader does.
    """
    identity = SequenceId(request, index)
    row = f"[{request},{index},".encode()
    name = f'"request":{request},'.encode()
    drain: list[LogLine] = []
    is_marked = False
    later = dropwhile(lambda line: line.tag in DECISION_TAGS, reader.lines_from(s + 1))
    for number, line in enumerate(later):
        if number == max_lines:
            return None
        check()
        if line.tag in FACT_TAGS:
            if is_marked:
                drain.clear()
            is_marked = _IS_MARKED.match(line.body) is not None
        drain.append(line)
        if line.tag == "launch" and row in line.body:
            launched = line.event()
            assert isinstance(launched, Launched)
            if identity in rows_of(launched):
                return _found(launched, identity, drain)
        elif line.tag in ("finish", "closing", "forward") and name in line.body:
            end = line.event()
            assert isinstance(end, Finished | Closing | Forwarded)
            if (end.request, end.index) == identity:
                return _found(end, identity, drain)
    return None


def _found(decision: Launched | Finished | Closing | Forwarded, identity: SequenceId, drain: list[LogLine]) -> NextStep:
    facts = [event for line in drain if line.tag in FACT_TAGS and isinstance(event := line.event(), Fact)]
    # Of a drain that began before the search its first facts are not there.
    fact = facts[-1] if facts else None
    is_launch = isinstance(decision, Launched)
    return NextStep(
        request=identity.request,
        index=identity.index,
        s=decision.s,
        ts=decision.ts,
        ended="" if isinstance(decision, Launched | Forwarded) else decision.reason,
        replica=decision.replica if isinstance(decision, Launched | Forwarded) else -1,
        step=decision.step if isinstance(decision, Launched) else -1,
        num_tokens=rows_of(decision)[identity].num_tokens if isinstance(decision, Launched) else 0,
        fact_s=decision.c if fact is None else fact.s,
        fact="" if fact is None else str(type(fact).__struct_config__.tag),
        first_s=facts[0].s if facts else decision.c,
        departures=list(_departures(drain)) if is_launch else [],
    )


def _departures(drain: list[LogLine]) -> Iterator[Departure]:
    for line in drain:
        if line.tag in ("finish", "closing", "preempt"):
            event = line.event()
            assert isinstance(event, Finished | Closing | Preempted)
            how = f"preempted: {event.reason}" if isinstance(event, Preempted) else f"ended: {event.reason}"
            yield Departure(sequence=SequenceId(event.request, event.index), how=how)
