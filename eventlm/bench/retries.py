"""Which failed attempts are tried again, and when."""

from __future__ import annotations

from msgspec import Struct

from eventlm.bench.draws import random_stream
from eventlm.client.errors import ClientError

#: The longest wait of the backoff itself; a server may ask for more.
MAX_BACKOFF_S = 60.0
#: Beside all from 500 on.
_RETRIED_STATUSES = frozenset({408, 425, 429})
_RETRIED_KINDS = frozenset({"connection", "timeout", "broken"})


class Retries(Struct, frozen=True):
    """At most `number` more attempts of a request.

    The backoff doubles from `backoff_s` and is cut by up to a half, by a draw of its own for each attempt, so that it
    grows and requests that failed together come back apart. What the server asks for in `Retry-After` is added to it,
    unless it is more than `max_wait_s`: such a request has failed.
    """

    number: int = 0
    backoff_s: float = 0.0
    max_wait_s: float = 0.0
    seed: int = 0

    def wait_s(self, error: ClientError, *, index: int, num_failed: int) -> float | None:
        """Seconds from the failure of attempt `num_failed` of request `index` to the next; None if there is none."""
        asked_s = error.retry_after_s or 0.0
        if num_failed > self.number or not is_passing(error) or asked_s > self.max_wait_s:
            return None
        backoff_s = min(self.backoff_s * 2.0 ** min(num_failed - 1, 60), MAX_BACKOFF_S)
        return asked_s + backoff_s * random_stream(self.seed, "retry", index, num_failed).uniform(0.5, 1.0)


NO_RETRIES = Retries()


def is_passing(error: ClientError) -> bool:
    """Whether another attempt may succeed: the server is busy, broken or away, and not of another opinion."""
    if error.kind == "http" and error.status is not None:
        return error.status >= 500 or error.status in _RETRIED_STATUSES
    return error.kind in _RETRIED_KINDS


def error_kind(error: ClientError) -> str:
    """The kind under which an error is counted, such as `http 429` or `timeout`."""
    return f"http {error.status}" if error.status is not None else error.kind
