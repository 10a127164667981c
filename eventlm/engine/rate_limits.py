"""Limits of each key: requests and tokens per minute, and requests at once. Counted by the engine for all front ends.

Requests and tokens are token buckets that hold a minute's worth and fill continuously. All is in integers: a request or
token is as many units as a minute has nanoseconds, so a bucket gains `limit` units in each nanosecond. A request is
charged for the most tokens that it may produce, and the charge is corrected at its end.

Pure given a clock: every call brings the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from eventlm.errors import EventLMError
from eventlm.formatting import counted
from eventlm.types import ceil_div

MINUTE_NS = 60_000_000_000
#: How long a key with too many concurrent requests should wait: the end of a request cannot be foreseen.
CONCURRENCY_RETRY_NS = 1_000_000_000
#: Beyond it, owners with nothing under way and full buckets are forgotten: a new bucket is full too.
_MANY_OWNERS = 1024

_Limit = Annotated[int, Meta(ge=0, le=1_000_000_000_000)]
LimitKind = Literal["requests", "tokens"]


class RateLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one key may use; 0 is no limit."""

    requests_per_minute: _Limit = 0
    tokens_per_minute: _Limit = 0
    concurrent_requests: _Limit = 0

    def __bool__(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrent_requests)


NO_LIMITS = RateLimits()


class BucketState(Struct, frozen=True):
    """A limit as the client sees it: the limit, what is left, and when it will be whole again."""

    limit: int
    remaining: int
    reset_ns: int


class RateLimitState(Struct, frozen=True, kw_only=True):
    """All of a key's limits at one moment; None where there is none."""

    requests: BucketState | None = None
    tokens: BucketState | None = None


class RateLimitError(EventLMError):
    """A key is over one of its limits. `retry_ns` 0: the same request will never be within them.

    The state may be plain data, as it comes from another process.
    """

    def __init__(self, message: str, kind: LimitKind, retry_ns: int, state: RateLimitState | dict[str, Any]) -> None:
        super().__init__(message, kind, retry_ns, state)
        self.kind = kind
        self.retry_ns = retry_ns
        self.state = msgspec.convert(state, RateLimitState)

    def __str__(self) -> str:
        return str(self.args[0])


class _Bucket:
    """What is left of a minute's worth, in units of 1 / MINUTE_NS."""

    __slots__ = ("_limit", "_now_ns", "_units")

    def __init__(self, limit: int, now_ns: int) -> None:
        self._limit = limit
        self._now_ns = now_ns
        self._units = limit * MINUTE_NS

    def advance(self, limit: int, now_ns: int) -> None:
        """Fill up to `now_ns`. A limit that has changed leaves the same share of the bucket."""
        if limit != self._limit:
            self._units = self._units * limit // self._limit if self._limit else limit * MINUTE_NS
            self._limit = limit
        self._units = min(self._units + limit * max(now_ns - self._now_ns, 0), limit * MINUTE_NS)
        self._now_ns = max(now_ns, self._now_ns)

    def is_full(self, now_ns: int) -> bool:
        self.advance(self._limit, now_ns)
        return self._units >= self._limit * MINUTE_NS

    def wait_ns(self, amount: int) -> int:
        """How long until `amount` is available; 0 if it is. The caller has checked that the bucket can hold it."""
        missing = amount * MINUTE_NS - self._units
        return ceil_div(missing, self._limit) if missing > 0 else 0

    def take(self, amount: int) -> None:
        """Take `amount`, or give it back if it is negative. Nothing is counted without a limit."""
        if not self._limit:
            return
        self._units = min(self._units - amount * MINUTE_NS, self._limit * MINUTE_NS)

    def state(self) -> BucketState:
        missing = self._limit * MINUTE_NS - self._units
        return BucketState(self._limit, max(self._units // MINUTE_NS, 0), ceil_div(missing, self._limit))


class _Account:
    """What one owner has used."""

    __slots__ = ("num_running", "requests", "tokens")

    def __init__(self, limits: RateLimits, now_ns: int) -> None:
        self.num_running = 0
        self.requests = _Bucket(limits.requests_per_minute, now_ns)
        self.tokens = _Bucket(limits.tokens_per_minute, now_ns)

    def advance(self, limits: RateLimits, now_ns: int) -> None:
        self.requests.advance(limits.requests_per_minute, now_ns)
        self.tokens.advance(limits.tokens_per_minute, now_ns)

    def state(self, limits: RateLimits) -> RateLimitState:
        return RateLimitState(
            requests=self.requests.state() if limits.requests_per_minute else None,
            tokens=self.tokens.state() if limits.tokens_per_minute else None,
        )


class RateLimiter:
    """The accounts of all owners that have limits. `refused` counts requests over them by class, '' for none."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self.refused: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._accounts)

    def charge(
        self, owner: str, limits: RateLimits, num_tokens: int, now_ns: int, *, classes: Iterable[str] = ("",)
    ) -> Charge:
        """Take one request of at most `num_tokens`, or raise RateLimitError and take nothing.

        classes: the class of each prompt of the request, for the count of refused ones.
        """
        account = self._account(owner, limits, now_ns)
        try:
            self._check(account, limits, num_tokens)
        except RateLimitError:
            self.refused.update(classes)
            raise
        account.num_running += 1
        account.requests.take(1)
        account.tokens.take(num_tokens)
        return Charge(account, limits, num_tokens)

    def count(self, owner: str, limits: RateLimits, now_ns: int) -> None:
        """Take one request that produces nothing, or raise RateLimitError and take nothing. It has no class."""
        if limits:
            account = self._account(owner, limits, now_ns)
            try:
                self._check_buckets(account, limits, 0)
            except RateLimitError:
                self.refused[""] += 1
                raise
            account.requests.take(1)

    def _account(self, owner: str, limits: RateLimits, now_ns: int) -> _Account:
        account = self._accounts.get(owner)
        if account is None:
            if len(self._accounts) >= _MANY_OWNERS:
                self._forget_idle(now_ns)
            account = self._accounts[owner] = _Account(limits, now_ns)
        account.advance(limits, now_ns)
        return account

    def _forget_idle(self, now_ns: int) -> None:
        self._accounts = {
            owner: account
            for owner, account in self._accounts.items()
            if account.num_running or not (account.requests.is_full(now_ns) and account.tokens.is_full(now_ns))
        }

    def _check(self, account: _Account, limits: RateLimits, num_tokens: int) -> None:
        per_minute = limits.tokens_per_minute
        if per_minute and num_tokens > per_minute:
            raise RateLimitError(
                f"The request asks for up to {num_tokens} tokens (prompt and max_tokens), and the key's limit is "
                f"{per_minute} tokens per minute: shorten the prompt or lower max_tokens.",
                kind="tokens",
                retry_ns=0,
                state=account.state(limits),
            )
        if limits.concurrent_requests and account.num_running >= limits.concurrent_requests:
            raise RateLimitError(
                f"The key's limit of {counted(limits.concurrent_requests, 'request')} at once is reached.",
                kind="requests",
                retry_ns=CONCURRENCY_RETRY_NS,
                state=account.state(limits),
            )
        self._check_buckets(account, limits, num_tokens)

    def _check_buckets(self, account: _Account, limits: RateLimits, num_tokens: int) -> None:
        waits: list[tuple[int, LimitKind, int]] = []
        if limits.requests_per_minute:
            waits.append((account.requests.wait_ns(1), "requests", limits.requests_per_minute))
        if per_minute := limits.tokens_per_minute:
            waits.append((account.tokens.wait_ns(num_tokens), "tokens", per_minute))
        wait_ns, kind, limit = max(waits, default=(0, "requests", 0))
        if wait_ns:
            raise RateLimitError(
                f"The key's limit of {counted(limit, kind[:-1])} per minute is reached.",
                kind=kind,
                retry_ns=wait_ns,
                state=account.state(limits),
            )


class Charge:
    """What one request has taken from its key's account, until `settle` or `refund`."""

    def __init__(self, account: _Account, limits: RateLimits, num_tokens: int) -> None:
        self._account: _Account | None = account
        self._num_tokens = num_tokens
        #: As it was after the request had been charged.
        self.state = account.state(limits)

    def settle(self, num_tokens: int) -> None:
        """The request is over and has used `num_tokens`. Only the first call of this or `refund` counts."""
        account, self._account = self._account, None
        if account is not None:
            account.num_running -= 1
            account.tokens.take(num_tokens - self._num_tokens)

    def refund(self) -> None:
        """The request was refused after all: it has cost nothing."""
        account = self._account
        self.settle(0)
        if account is not None:
            account.requests.take(-1)
