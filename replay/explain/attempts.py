"""The attempts of a forwarded sequence in sentences."""

from __future__ import annotations

from eventlm.formatting import counted
from eventlm.replay.explain.result import AttemptShare, Explanation
from eventlm.replay.explain.words import milliseconds

_ENDS = {
    "withdrawn": "was withdrawn, as another one had answered",
    "cut": "was under way at the end",
    "lost": "was lost with its engine",
}


def attempts_in_words(explanation: Explanation) -> str:
    """A sentence on each attempt, in the order in which they were sent."""
    found = sorted(explanation.attempts, key=lambda each: each.number)
    return " ".join(_sentence(explanation, attempt) for attempt in found)


def _sentence(explanation: Explanation, attempt: AttemptShare) -> str:
    where = attempt.backend or f"replica {attempt.replica}"
    facts = [f"{attempt.running:,} of at most {attempt.limit:,} there"] if attempt.limit else []
    if attempt.cached_tokens:
        facts.append(f"{counted(attempt.cached_tokens, 'token')} of its prompt taken to be cached")
    beside = f" ({', '.join(facts)})" if facts else ""
    hedge = ", beside the first one," if attempt.is_hedge else ""
    sent = milliseconds(attempt.sent_ns - explanation.start_ns)
    first = "and "
    if attempt.first_ns is not None:
        tokens = f"{counted(attempt.num_tokens, 'token')}, the first after " if attempt.num_tokens else ""
        first = f"brought {tokens}{milliseconds(attempt.first_ns - attempt.sent_ns)}, and "
    return f"Attempt {attempt.number}{hedge} went to {where} after {sent}{beside}, {first}{_end(explanation, attempt)}."


def _end(explanation: Explanation, attempt: AttemptShare) -> str:
    took = milliseconds(attempt.ended_ns - attempt.sent_ns)
    if attempt.end == "answered":
        return f"ended well after {took}"
    if attempt.end in _ENDS:
        return _ENDS[attempt.end]
    status = f", status {attempt.status}" if attempt.status else ""
    asked = f", asking to wait {milliseconds(attempt.retry_after_ns)}" if attempt.retry_after_ns else ""
    again = ""
    if attempt.retry_ns is not None:
        again = f"; it was to be sent again {milliseconds(attempt.retry_ns - attempt.ended_ns)} later"
    return f"failed after {took} ({attempt.end}{status}{asked}){again}"
