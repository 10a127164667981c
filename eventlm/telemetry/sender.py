"""SpanSender: a bounded queue of spans before an OTLP receiver. Nobody waits for it: what it cannot hold is counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque

import aiohttp
from google.protobuf.message import DecodeError

from eventlm.telemetry.protobuf import encode_request, num_rejected
from eventlm.telemetry.spans import Attributes, Span

MAX_WAITING = 20_000
BATCH_SPANS = 512
#: How long a batch that is not full may wait for more.
BATCH_SECONDS = 1.0
POST_SECONDS = 10.0
#: Pauses after failed posts, doubled from the first to the last.
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.5, 30.0
#: Answers after which the protocol lets a client try again. Any other refuses the spans.
_TRY_AGAIN = (429, 502, 503, 504)
_PROBLEM_LENGTH = 200

QUEUE_FULL, REFUSED, NOT_SENT = "queue_full", "refused", "not_sent"


class SpanSender:
    """`put` spans, and `run` in a task. num_sent, num_dropped by reason, num_failures of posts, and `problem`: why the
    latest failed; empty if it did not.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, resource: Attributes, *, max_waiting: int = MAX_WAITING
    ) -> None:
        self.num_sent = 0
        self.num_dropped: Counter[str] = Counter()
        self.num_failures = 0
        self.problem = ""
        self._session = session
        self._url = url
        self._resource = resource
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[Span, int]] = deque()
        #: A full batch waits, or the last one.
        self._is_due = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Spans that are neither sent nor dropped."""
        return len(self._waiting)

    @property
    def resume_s(self) -> int | None:
        """The `resume_s` of the oldest span that waits; None if none does."""
        return self._waiting[0][1] if self._waiting else None

    def put(self, span: Span, resume_s: int = 0) -> None:
        """Queue a span, or drop it. resume_s: the event to read the log from to make it, and all later ones, again."""
        if len(self._waiting) >= self._max_waiting:
            self.num_dropped[QUEUE_FULL] += 1
            return
        self._waiting.append((span, resume_s))
        if len(self._waiting) >= BATCH_SPANS:
            self._is_due.set()

    async def run(self) -> None:
        """Send batches until this is cancelled, which leaves all spans queued that have not been sent."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_due.wait(), BATCH_SECONDS)
            if not self._waiting or await self._send_batch():
                pause = FIRST_PAUSE_SECONDS
                if len(self._waiting) < BATCH_SPANS:
                    self._is_due.clear()
                continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE_SECONDS)

    async def flush(self) -> None:
        """Try once to send what waits; the rest is dropped at the first failure. Not beside `run`."""
        try:
            while self._waiting and await self._send_batch():
                pass
        finally:
            if self._waiting:
                self.num_dropped[NOT_SENT] += len(self._waiting)
            self._waiting.clear()

    async def _send_batch(self) -> bool:
        """Send the oldest spans; False if they must be sent again."""
        count = min(len(self._waiting), BATCH_SPANS)
        body = encode_request([self._waiting[index][0] for index in range(count)], self._resource)
        try:
            async with self._session.post(
                self._url,
                data=body,
                headers={"Content-Type": "application/x-protobuf"},
                timeout=aiohttp.ClientTimeout(total=POST_SECONDS),
                allow_redirects=False,
            ) as response:
                answer = await response.read()
        # aiohttp raises ValueError for some of what it cannot send.
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return self._fail(str(error) or type(error).__name__)
        if response.status in _TRY_AGAIN:
            return self._fail(f"HTTP {response.status}")
        for _ in range(count):
            self._waiting.popleft()
        if not response.ok:
            self.num_dropped[REFUSED] += count
            self._fail(f"HTTP {response.status}, {count} spans dropped")
            return True
        if rejected := min(_rejected(answer), count):
            self.num_dropped[REFUSED] += rejected
        self.num_sent += count - rejected
        self.problem = ""
        return True

    def _fail(self, problem: str) -> bool:
        self.num_failures += 1
        self.problem = problem[:_PROBLEM_LENGTH]
        return False


def _rejected(answer: bytes) -> int:
    """As `num_rejected`; 0 for an answer in another encoding."""
    try:
        return num_rejected(answer)
    except DecodeError:
        return 0
