"""Tables from the index alone: marks, and sequences that are not live."""

from __future__ import annotations

from eventlm.config.options import did_you_mean
from eventlm.errors import UsageError
from eventlm.formatting import counted
from eventlm.replay.debugger.results import TableResult, seconds, sequence_name
from eventlm.replay.expressions.evaluation import Value
from eventlm.replay.index.index import Index
from eventlm.replay.index.tables import MarkKind, SequencePhase

_KINDS = {kind.name.lower(): kind for kind in MarkKind}


def marks(index: Index, words: list[str], position: int) -> TableResult:
    """The marks of a run, or those of one kind. Raises UsageError for another kind."""
    if len(words) > 1 or (words and words[0] not in _KINDS):
        hint = did_you_mean(words[0], _KINDS, listed_as="kinds are")
        raise UsageError(f"{' '.join(words)!r} is no kind of mark{hint}")
    wanted = _KINDS[words[0]] if words else None
    rows: list[list[Value]] = []
    num_behind = 0
    for number, row in enumerate(index.marks.rows()):
        if wanted is not None and row["kind"] != wanted:
            continue
        num_behind += row["s"] <= position
        who = sequence_name((row["request"], max(row["index"], 0))) if row["request"] >= 0 else ""
        by = sequence_name((row["by_request"], row["by_index"])) if row["by_request"] >= 0 else ""
        where = None if row["replica"] < 0 else row["replica"]
        kind = MarkKind(row["kind"]).name.lower()
        rows.append([number, row["s"], seconds(row["ts"]), kind, where, who, by, index.name(row["text"])])
    what = counted(len(rows), "mark")
    return TableResult(
        title=f"{what}, {num_behind:,} of them at or before event {position:,}",
        columns=["mark", "event", "time", "kind", "replica", "request", "for", "text"],
        rows=rows,
    )


def recorded_sequence(index: Index, request: int, sample: int, position: int) -> TableResult:
    """A sequence as the log has it, with all its phases."""
    found = index.find_row(request, sample)
    assert found is not None
    row = index.requests.row(found)
    name = sequence_name((request, sample), row["samples"])
    if request > position:
        title = f"request {request} had not arrived at event {position:,}; it did at {seconds(row['arrived_ns'])}"
    elif 0 <= row["ended_s"] <= position:
        title = f"request {name} had ended at event {position:,}, with `{index.name(row['reason'])}`"
    else:
        title = f"request {name}, by the log"
    phases = index.phases
    own = phases["row"] == found
    rows: list[list[Value]] = []
    for phase in phases.rows(own):
        end_ns = phase["end_ns"]
        rows.append(
            [
                SequencePhase(phase["phase"]).name.lower(),
                seconds(phase["start_ns"]),
                "-" if end_ns < 0 else seconds(end_ns),
                None if end_ns < 0 else end_ns - phase["start_ns"],
                None if phase["replica"] < 0 else phase["replica"],
                None if phase["first_step"] < 0 else phase["first_step"],
                None if phase["last_step"] < 0 else phase["last_step"],
            ]
        )
    tokens = f"{counted(row['prompt_tokens'], 'prompt token')}, {counted(max(row['output_tokens'], 0), 'output token')}"
    return TableResult(
        title=title,
        columns=["phase", "from", "to", "took_ns", "replica", "first step", "last step"],
        rows=rows,
        notes=[f"{tokens}, {counted(row['preemptions'], 'preemption')}"],
    )
