"""What a group of requests uses of its key's limits: charged before it is admitted, corrected when it is over."""

from __future__ import annotations

from collections.abc import Sequence

from eventlm.engine.rate_limits import Charge, RateLimiter
from eventlm.engine.request import FinishedOutput, Put, Request, RequestOutput, Submission, TakenOver
from eventlm.errors import EventLMError


def charge_for(limiter: RateLimiter, submission: Submission, group: Sequence[Request], now_ns: int) -> Charge | None:
    """Charge the group as one request, with all prompts and the most tokens it may produce; None without limits.

    Raises RateLimitError.
    """
    if not submission.limits:
        return None
    num_tokens = sum(len(each.prompt_token_ids) + each.n * each.max_tokens for each in group)
    classes = [each.scheduling.service_class for each in group]
    return limiter.charge(submission.owner, submission.limits, num_tokens, now_ns, classes=classes)


def metered(charge: Charge, group: Sequence[Request], sinks: Sequence[Put]) -> list[Put]:
    """The sinks of the group's requests, which settle the charge when the last sequence is over."""
    num_unfinished = sum(request.n for request in group)
    num_tokens = sum(len(request.prompt_token_ids) for request in group)

    def meter(put: Put) -> Put:
        def sink(output: RequestOutput | TakenOver | EventLMError) -> None:
            nonlocal num_unfinished, num_tokens
            if isinstance(output, EventLMError):
                charge.settle(num_tokens)
            elif isinstance(output, FinishedOutput):
                num_unfinished -= 1
                num_tokens += output.position
                if not num_unfinished:
                    charge.settle(num_tokens)
            put(output)

        return sink

    return [meter(put) for put in sinks]
