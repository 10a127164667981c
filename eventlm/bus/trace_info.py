"""The state of a trace and its run in numbers, for `trace check` and `trace info`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal

from msgspec import Struct

from eventlm.bus.log_reader import LogReader, TornTail
from eventlm.events import Arrived, Emitted, Finished, Header, Launched, Rejected, Relayed
from eventlm.events.codec import DECISION_TAGS, FACT_TAGS
from eventlm.types import OnProgress

#: `end`: it ends in an end record; `no_end`: its writer died between two lines; `torn`: within one.
EndState = Literal["end", "no_end", "torn", "still_being_written"]


class TraceCheck(Struct, frozen=True, kw_only=True):
    """A trace whose every complete line has been found right: its hash, its position and its fields.

    first_s: above 0 where the run's first segments are not kept. num_missing: events in gaps.
    """

    path: str
    num_events: int
    num_bytes: int
    num_segments: int
    first_s: int
    num_missing: int
    end_state: EndState
    torn: TornTail | None
    warnings: list[str]


class TraceInfo(Struct, frozen=True, kw_only=True):
    """The run in numbers. Counts are by tag or by reason, in alphabetical order; `duration_ns` is the last
    `ts`.

    num_prompt_tokens: of all requests that arrived, each once for all its samples. num_output_tokens: that were shown.
    num_steps: that were launched.
    """

    check: TraceCheck
    header: Header
    duration_ns: int
    num_facts: int
    num_decisions: int
    num_markers: int
    events_by_tag: dict[str, int]
    num_requests: int
    num_rejected: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int
    num_preemptions: int
    finish_reasons: dict[str, int]
    reject_reasons: dict[str, int]


def check(path: Path | str, *, strict: bool = False, on_progress: OnProgress | None = None) -> TraceCheck:
    """Read the whole trace, every event of it decoded. Raises as LogReader does."""
    with LogReader(path, strict=strict) as reader:
        for line in reader.lines(on_progress):
            line.event()
        return _summary(reader)


def info(path: Path | str, *, strict: bool = False, on_progress: OnProgress | None = None) -> TraceInfo:
    """Read the whole trace and count. Raises as LogReader does."""
    tags: Counter[str] = Counter()
    finish_reasons: Counter[str] = Counter()
    reject_reasons: Counter[str] = Counter()
    num_prompt_tokens = num_output_tokens = num_steps = duration_ns = 0
    with LogReader(path, strict=strict) as reader:
        for line in reader.lines(on_progress):
            event = line.event()
            tags[line.tag] += 1
            duration_ns = max(duration_ns, event.ts)
            match event:
                case Arrived():
                    num_prompt_tokens += event.prompt_tokens
                case Emitted() | Relayed():
                    num_output_tokens += event.num_tokens
                case Launched():
                    num_steps += 1
                case Finished():
                    finish_reasons[event.reason] += 1
                case Rejected():
                    reject_reasons[event.reason] += 1
        summary, header = _summary(reader), reader.header
    num_facts = sum(count for tag, count in tags.items() if tag in FACT_TAGS)
    num_decisions = sum(count for tag, count in tags.items() if tag in DECISION_TAGS)
    return TraceInfo(
        check=summary,
        header=header,
        duration_ns=duration_ns,
        num_facts=num_facts,
        num_decisions=num_decisions,
        num_markers=summary.num_events - num_facts - num_decisions,
        events_by_tag=dict(sorted(tags.items())),
        num_requests=tags["arrive"],
        num_rejected=tags["reject"],
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        num_steps=num_steps,
        num_preemptions=tags["preempt"],
        finish_reasons=dict(sorted(finish_reasons.items())),
        reject_reasons=dict(sorted(reject_reasons.items())),
    )


def _summary(reader: LogReader) -> TraceCheck:
    end_state: EndState = "no_end"
    if reader.still_being_written:
        end_state = "still_being_written"
    elif reader.torn is not None:
        end_state = "torn"
    elif reader.clean_end:
        end_state = "end"
    return TraceCheck(
        path=reader.path,
        num_events=reader.num_lines,
        num_bytes=reader.position,
        num_segments=reader.num_segments,
        first_s=reader.header.s,
        num_missing=reader.num_missing,
        end_state=end_state,
        torn=reader.torn,
        warnings=reader.warnings(),
    )
