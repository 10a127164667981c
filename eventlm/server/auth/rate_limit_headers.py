"""What a key's holder is told of its limits, in OpenAI's headers."""

from __future__ import annotations

from eventlm.engine.rate_limits import RateLimitState

_MS_NS = 1_000_000


def rate_limit_headers(state: RateLimitState) -> dict[str, str]:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}`, for the limits that there are."""
    headers = {}
    for kind, bucket in (("requests", state.requests), ("tokens", state.tokens)):
        if bucket is not None:
            headers[f"x-ratelimit-limit-{kind}"] = str(bucket.limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(bucket.remaining)
            headers[f"x-ratelimit-reset-{kind}"] = format_duration(bucket.reset_ns)
    return headers


def format_duration(duration_ns: int) -> str:
    """As OpenAI writes it: `120ms`, `1s`, `1.5s`, `6m0s`; rounded up to a millisecond, never down to nothing."""
    total_ms = -(-duration_ns // _MS_NS)
    if total_ms < 1000:
        return f"{total_ms}ms" if total_ms else "0s"
    minutes, rest_ms = divmod(total_ms, 60_000)
    seconds = f"{rest_ms // 1000}.{rest_ms % 1000:03d}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{seconds}" if minutes else seconds
