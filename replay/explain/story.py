"""Explanations in sentences, and labels of their parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import msgspec

from eventlm.formatting import counted
from eventlm.policies.lrs import FRACTION_BITS
from eventlm.replay.explain.attempts import attempts_in_words
from eventlm.replay.explain.result import (
    IN_STEP,
    Cause,
    Explanation,
    Interval,
    Order,
    Preemption,
    StepShare,
    parts,
)
from eventlm.replay.explain.words import label, listed, milliseconds
from eventlm.types import NANOSECONDS_PER_MILLISECOND, SequenceId

#: Requests or steps of a list that are named.
_MAX_NAMED = 3
_MAX_CLAUSES = 5


def describe(explanation: Explanation, *, cut: str = "when the log does") -> list[str]:
    """Paragraphs: a summary, and one for each phase, in order. cut: where one that has not ended is cut off."""
    paragraphs = [_opening(explanation, cut)]
    paragraphs += [f"Note: {note}." for note in explanation.notes]
    describers = {
        "unseen": _unseen,
        "edge": _edge,
        "queue": _queue,
        "prefill": _prefill,
        "retry": _retry,
        "preempted": _preempted,
        "recompute": _recompute,
        "decode": _decode,
        "text_end": _text_end,
    }
    for phase, describer in describers.items():
        intervals = [interval for interval in explanation.intervals if interval.phase == phase]
        if intervals and not explanation.outcome.startswith("rejected"):
            paragraphs.append(describer(explanation, intervals))
    return paragraphs


def by_key(order: Order) -> str:
    """Why the other one went first, in terms of the policy."""
    (priority, key), (own_priority, own_key) = order.other_urgency, order.own_urgency
    if priority != own_priority:
        return f"its priority was {priority} against {own_priority}, and lower goes first"
    if key == own_key:
        return f"under {order.policy} both are equal, and it came first"
    if order.policy == "fcfs":
        return f"it arrived {milliseconds(own_key - key)} earlier"
    if order.policy == "edf":
        return f"its deadline was {milliseconds(own_key - key)} earlier"
    if order.policy == "lrs":
        slack, own_slack = _distinguishable(key / (1 << FRACTION_BITS), own_key / (1 << FRACTION_BITS))
        return f"its slack was {slack} of its deadline against {own_slack}, and smaller goes first"
    if order.policy == "lpm":
        return f"with the wait counted in, it had {own_key - key:,} tokens more cached"
    return f"its key under {order.policy} was {key:,} against {own_key:,}, and smaller goes first"


def _distinguishable(value: float, other: float) -> tuple[str, str]:
    """Two numbers with as many digits as are needed to compare them, from two to six."""
    pairs = [(f"{value:,.{digits}f}", f"{other:,.{digits}f}") for digits in range(2, 7)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1])


def _opening(explanation: Explanation, cut: str) -> str:
    what = f"Request {explanation.request}"
    if explanation.n > 1:
        what = f"Sample {explanation.name} of request {explanation.request}'s {explanation.n}"
    tokens = [counted(explanation.prompt_tokens, "prompt token")]
    if explanation.cached_tokens:
        tokens[0] += f", {explanation.cached_tokens:,} of them cached"
    if explanation.kind == "generate":
        tokens.append(counted(explanation.output_tokens, "output token"))
    else:
        tokens.append(explanation.kind)
    what += f" ({', '.join([*tokens, explanation.policy])})"
    total = milliseconds(explanation.total_ns)
    if explanation.outcome.startswith("rejected"):
        return f"{what} was {explanation.outcome}, {total} after its reception."
    first = ""
    if explanation.first_token_ns is not None:
        first = f"; its first token came after {milliseconds(explanation.first_token_ns - explanation.start_ns)}"
    if explanation.outcome == "unfinished":
        return f"{what} had not ended {cut}, after {total}{first}."
    if explanation.outcome == "unknown":
        return f"{what} ended where nothing was recorded, and was last seen after {total}{first}."
    return f"{what} took {total} and ended with `{explanation.outcome}`{first}.{_deadline(explanation)}"


def _deadline(explanation: Explanation) -> str:
    """A sentence on the request's own deadline, if it has one."""
    if not explanation.deadline_ns:
        return ""
    due = f" Its first token was due {milliseconds(explanation.deadline_ns)} after its arrival"
    if explanation.first_token_ns is None:
        return f"{due} and never came."
    spare_ns = explanation.arrived_ns + explanation.deadline_ns - explanation.first_token_ns
    return f"{due} and came {milliseconds(abs(spare_ns))} {'before' if spare_ns >= 0 else 'after'} that."


def _unseen(explanation: Explanation, intervals: list[Interval]) -> str:
    return f"{milliseconds(_sum(intervals))} of it are not in the log."


def _edge(explanation: Explanation, intervals: list[Interval]) -> str:
    words = {
        "receiving": "from its reception to its arrival",
        "tokenizing": "until its prompt was tokenized",
        "stamping": "from there until the engine took it in",
    }
    clauses = [f"{milliseconds(each.duration_ns)} {words[each.cause]}" for each in intervals]
    return f"It reached the scheduler after {milliseconds(_sum(intervals))}: {listed(clauses)}."


def _queue(explanation: Explanation, intervals: list[Interval]) -> str:
    what = "sent to a backend" if explanation.is_forwarded else "admitted"
    return _by_cause(f"It waited {{}} to be {what}", explanation, intervals)


def _retry(explanation: Explanation, intervals: list[Interval]) -> str:
    return _by_cause("It waited {} to be sent again", explanation, intervals)


def _prefill(explanation: Explanation, intervals: list[Interval]) -> str:
    if explanation.is_forwarded:
        story = _by_cause("It was at backends for {} before tokens came", explanation, intervals)
        return f"{story} {attempts_in_words(explanation)}"
    chunks = [step for step in explanation.steps if step.num_tokens and step.residency == 1]
    return _by_cause(f"Its prompt took {{}} in {_chunks(explanation, chunks)}", explanation, intervals)


def _recompute(explanation: Explanation, intervals: list[Interval]) -> str:
    chunks = [step for step in explanation.steps if step.num_tokens and step.residency > 1]
    tokens = counted(sum(chunk.num_tokens for chunk in chunks), "token")
    return _by_cause(f"Computing {tokens} again took {{}} in {_chunks(explanation, chunks)}", explanation, intervals)


def _where(explanation: Explanation, replicas: Iterable[int]) -> str:
    """A suffix for step numbers, which count on each replica."""
    found = [str(replica) for replica in sorted(set(replicas))]
    if explanation.num_replicas == 1 or not found:
        return ""
    return f" of replica{'s' * (len(found) > 1)} {listed(found)}"


def _chunks(explanation: Explanation, chunks: Seq[StepShare]) -> str:
    if not chunks:
        return "no step that completed"
    clauses = []
    for chunk in chunks[:_MAX_NAMED]:
        beside = [counted(chunk.num_decodes, "decode")] if chunk.num_decodes else []
        beside += [f"{counted(chunk.num_chunk_tokens, 'prompt token')} of others"] if chunk.num_chunk_tokens else []
        words = f"step {chunk.step}: {counted(chunk.num_tokens, 'token')}"
        clauses.append(words + (f" beside {listed(beside)}" if beside else ""))
    left = chunks[_MAX_NAMED:]
    if left:
        clauses.append(f"{len(left):,} more: {counted(sum(chunk.num_tokens for chunk in left), 'token')}")
    where = _where(explanation, [chunk.replica for chunk in chunks])
    return f"{counted(len(chunks), 'step')}{where} ({'; '.join(clauses)})"


def _decode(explanation: Explanation, intervals: list[Interval]) -> str:
    if explanation.is_forwarded:
        return _by_cause("Tokens came for {}", explanation, intervals)
    decodes = [step for step in explanation.steps if not step.num_tokens]
    mixed = {(step.replica, step.step): step for step in decodes if step.num_chunk_tokens}
    shared: dict[tuple[int, int], int] = {}
    for each in intervals:
        if each.cause in IN_STEP and (key := (each.replica, each.steps[0])) in mixed:
            shared[key] = shared.get(key, 0) + each.duration_ns
    steps = counted(len(decodes), "step") + _where(explanation, [step.replica for step in decodes])
    if shared:
        longest = max(shared, key=shared.__getitem__)
        step = mixed[longest]
        steps += (
            f", of which {milliseconds(sum(shared.values()))} in {len(shared):,} that also had prompt chunks of others "
            f"(the longest: step {step.step}, {milliseconds(shared[longest])}, "
            f"{counted(step.num_chunk_tokens, 'token')})"
        )
    return _by_cause(f"Decoding took {{}} in {steps}", explanation, intervals)


def _preempted(explanation: Explanation, intervals: list[Interval]) -> str:
    found = explanation.preemptions
    times = {1: "once", 2: "twice"}.get(len(found), f"{len(found):,} times")
    clauses = [_preemption(explanation, each) for each in found[:_MAX_NAMED]]
    if len(found) > _MAX_NAMED:
        clauses.append(f"and {counted(len(found) - _MAX_NAMED, 'more time')}")
    opening = f"It was preempted {times}: {'; '.join(clauses)}." if clauses else "It had been preempted."
    return f"{opening} {_by_cause('It waited {} to be admitted again', explanation, intervals)}"


def _preemption(explanation: Explanation, preemption: Preemption) -> str:
    when = f"after {milliseconds(preemption.at_ns - explanation.start_ns)}"
    if preemption.by is None:
        is_lost = preemption.reason == "lost"
        return f"{when} {'its worker was lost' if is_lost else 'it needed a block and no less urgent sequence had one'}"
    who = _names(explanation, [preemption.by])
    why = "needed a block" if preemption.reason == "memory" else "was admitted in its place"
    key = f" ({by_key(preemption.order)})" if preemption.order is not None else ""
    return f"{when} {who} {why}{key}"


def _text_end(explanation: Explanation, intervals: list[Interval]) -> str:
    return f"Then {milliseconds(_sum(intervals))} passed until the server had looked for the end of its text."


def _by_cause(opening: str, explanation: Explanation, intervals: list[Interval]) -> str:
    """`opening` with the total time, the time of each cause, longest first, and why another sequence was ahead."""
    groups: dict[Cause, list[Interval]] = {}
    for interval in intervals:
        groups.setdefault(interval.cause, []).append(interval)
    ordered = sorted(groups.items(), key=lambda item: (-_sum(item[1]), item[0]))
    clauses = [
        f"{milliseconds(_sum(group))} {_reason(explanation, cause, group)}" for cause, group in ordered[:_MAX_CLAUSES]
    ]
    left = [interval for _, group in ordered[_MAX_CLAUSES:] for interval in group]
    if left:
        clauses.append(f"{milliseconds(_sum(left))} for other reasons")
    found = opening.format(milliseconds(_sum(intervals)))
    if len(groups) > 1:
        found += f": {'; '.join(clauses)}"
    elif "step" not in groups and "streaming" not in groups:
        found += f", {_reason(explanation, *ordered[0])}"
    return f"{found}.{_order(explanation, intervals)}"


def _reason(explanation: Explanation, cause: Cause, group: list[Interval]) -> str:
    """Why it was in no step, or its step was not computed; follows a duration."""
    first = group[0]
    behind = _behind(explanation, group)
    if cause == "sequence_limit":
        limit = f"{first.limit:,}{' a replica' * (explanation.num_replicas > 1)}"
        return f"behind {behind} (the sequence limit of {limit} was reached)"
    if cause == "backend_limit":
        return f"behind {behind} (the backend had as many requests as it might, {first.limit:,})"
    if cause == "blocks":
        most = max(interval.num_lacking for interval in group)
        blocks = f"{'up to ' * (most > 1)}{counted(most, 'block')}"
        return f"for want of {blocks}, behind {behind} (the pool has {first.limit:,})"
    if cause == "token_budget":
        steps = list(dict.fromkeys(step for interval in group for step in interval.steps))
        where = _where(explanation, [interval.replica for interval in group if interval.steps])
        prompts = f", among them prompts of {behind}" if behind else ""
        return (
            f"because the token budget of {first.limit:,} went to more urgent rows in {_steps(steps)}{where}{prompts}"
        )
    if cause == "head_of_line" and first.other is not None:
        who = _names(explanation, [first.other])
        return f"behind {who}, which was more urgent, did not fit and was not to be passed over again"
    if cause == "trial" and first.other is not None:
        if first.other == (explanation.request, explanation.index):
            return "until it could be tried alone, because workers had been lost while they computed it"
        who = _names(explanation, [first.other])
        return f"while {who} was tried alone, because workers had been lost while they computed it"
    if cause == "steps_in_flight":
        return f"until a step had completed ({len(first.steps):,} of at most {first.limit:,} were in flight)"
    return _REASONS[cause]


_REASONS: dict[Cause, str] = {
    "step": "computing",
    "stage_wait": "waiting for stages that computed other steps",
    "exchange": "on the way from stage to stage",
    "batcher": "because the batcher gave it no tokens of a step",
    "micro_batch": "because a step had its share of more urgent ones, and the next step took it",
    "avoided": "for another backend than the one where it had just failed",
    "worker": "until a worker came up",
    "backend": "until a backend came up",
    "backoff": "until its next attempt was due",
    "paused": "while the engine was paused",
    "draining": "until the steps that it was still in had completed",
    "grammar": "until its grammar was built",
    "other_step": "at the worker, behind earlier steps without it",
    "dispatch": "from launches to the start of its steps",
    "return": "from the end of its steps until the engine took in their results",
    "lost_step": "in steps whose worker was lost",
    "engine_down": "while there was no engine",
    "cut_step": "in a step that was still under way at its end",
    "first_token": "for the network, the backend's queue and its prefill",
    "streaming": "from token to token",
    "failed_attempt": "in attempts that failed",
    "outrun": "at a backend that a second attempt was faster than",
    "cut_attempt": "at a backend that had not answered by its end",
}


def _behind(explanation: Explanation, group: list[Interval]) -> str:
    identities = [identity for interval in group for identity in [*interval.held_by, *interval.admitted]]
    names = _names(explanation, identities)
    others = [identity.request for identity in identities if identity.request != explanation.request]
    if not others or len(others) < len(identities):
        return names
    num_later = len({request for request in others if request > explanation.request})
    if not num_later:
        return f"{names} that had arrived before it"
    if num_later == len(set(others)):
        return f"{names} that arrived after it"
    return f"{names}, {num_later:,} of them {'later arrivals' if num_later > 1 else 'a later arrival'}"


def _names(explanation: Explanation, identities: Iterable[SequenceId]) -> str:
    """`requests 7, 8 and 5 others`, each once; samples of its own request are named as such."""
    requests = sorted({identity.request for identity in identities})
    own = ["another sample of its own"] if explanation.request in requests else []
    others = [str(request) for request in requests if request != explanation.request]
    if not others:
        return own[0] if own else ""
    named = others[:_MAX_NAMED] if len(others) > _MAX_NAMED + 1 else others
    left = len(others) - len(named)
    return f"request{'s' * (len(others) > 1)} {listed([*named, *([counted(left, 'other')] if left else []), *own])}"


def _steps(steps: Seq[int]) -> str:
    if not steps:
        return "a step"
    if len(steps) == 1:
        return f"step {steps[0]}"
    if len(steps) == steps[-1] - steps[0] + 1:
        return f"steps {steps[0]} to {steps[-1]}"
    return f"{len(steps):,} steps from {steps[0]} to {steps[-1]}"


def _order(explanation: Explanation, intervals: list[Interval]) -> str:
    """One sentence on a sequence that was ahead: preferably a later arrival, then that of the longest interval."""
    known = [
        (each.order.other.request > explanation.request, each.duration_ns, each.order)
        for each in intervals
        if each.order is not None
    ]
    if not known:
        return ""
    *_, order = max(known, key=lambda each: each[:2])
    who = _names(explanation, [order.other])
    return f" {who[0].upper()}{who[1:]} was ahead of it: {by_key(order)}."


def _sum(intervals: Iterable[Interval]) -> int:
    return sum(interval.duration_ns for interval in intervals)


def to_object(explanation: Explanation) -> dict[str, Any]:
    """The explanation for JSON, with its total, its parts and its sentences."""
    more = {"total_ns": explanation.total_ns, "parts": parts(explanation), "story": describe(explanation)}
    found: dict[str, Any] = msgspec.to_builtins(explanation) | msgspec.to_builtins(more)
    return found


def part_rows(explanation: Explanation) -> Iterator[list[str]]:
    """Each part with its milliseconds and share, longest first, and the total."""
    total_ns = max(explanation.total_ns, 1)
    for part in parts(explanation):
        yield [label(part.phase, part.cause), _exact(part.duration_ns), f"{part.duration_ns / total_ns:.1%}"]
    yield ["total", _exact(explanation.total_ns), "100.0%"]


def _exact(ns: int) -> str:
    """Milliseconds to the nanosecond, so that a column adds up."""
    return f"{ns // NANOSECONDS_PER_MILLISECOND:,}.{ns % NANOSECONDS_PER_MILLISECOND:06d}"


def largest_part(explanation: Explanation, *, from_ns: int | None = None, until_ns: int | None = None) -> str:
    """The longest part of all, or between two times, in a few words."""
    found = parts(explanation, from_ns=from_ns, until_ns=until_ns)
    if not found:
        return "-"
    largest = found[0]
    whole_ns = sum(part.duration_ns for part in found)
    group = [each for each in explanation.intervals if (each.phase, each.cause) == (largest.phase, largest.cause)]
    behind = _names(explanation, [who for each in group for who in (each.other, *each.held_by, *each.admitted) if who])
    words = f"{largest.duration_ns / whole_ns:.0%} {label(largest.phase, largest.cause)}"
    return f"{words}, behind {behind}" if behind else words
