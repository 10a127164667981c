"""Explanations of replies while the engine runs: made by processes of their own, so that no step waits for one.

A process reads the run's trace, which is still being written, from the newest file that begins before the request. Few
run at a time, each for a bounded time; callers wait in a bounded line, which no single key can fill.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Literal

import msgspec
import structlog
from msgspec import Struct

from eventlm.engine.child_answer import ask_child
from eventlm.errors import EventLMError
from eventlm.system.processes import Processes

log = structlog.get_logger("eventlm.engine")

WORKER_MODULE = "eventlm.replay.explain.worker"
MAX_RUNNING = 1
MAX_WAITING = 16
#: So many of them for one key.
MAX_PER_OWNER = 4
TIMEOUT_SECONDS = 120.0

#: Why there is no explanation. too_many: ask again later. too_long: it took more than its time. not_kept: the trace
#: does not hold the request, or no longer does.
Reason = Literal["too_many", "too_long", "not_recorded", "not_kept", "failed"]


class NotExplainedError(EventLMError):
    """There is no explanation."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return self.message


class ExplainRequest(Struct, frozen=True, kw_only=True):
    """The input of a process: the folder of a run, and the seqs of the requests of a reply."""

    run_folder: str
    requests: list[int]


class ExplainResponse(Struct, frozen=True, kw_only=True):
    """Its answer: explanations as JSON, as `eventlm explain --json` prints them, and as text; or why there are none. It
    names no file.
    """

    explanations: list[str] = []
    warnings: list[str] = []
    text: str = ""
    reason: Reason | None = None
    error: str = ""


class Explanations:
    """Runs the processes, a few at a time."""

    def __init__(
        self,
        processes: Processes,
        *,
        max_running: int = MAX_RUNNING,
        max_waiting: int = MAX_WAITING,
        max_per_owner: int = MAX_PER_OWNER,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._processes = processes
        self._max_pending = max_running + max_waiting
        self._max_per_owner = max_per_owner
        self._timeout_seconds = timeout_seconds
        self._running = asyncio.Semaphore(max_running)
        #: Pending ones by key; the empty name stands for all clients without one.
        self._pending: Counter[str] = Counter()

    async def explain(self, run_folder: Path | None, requests: list[int], *, owner: str = "") -> ExplainResponse:
        """Explain requests of a run; None: it is not recorded. Raises NotExplainedError. A caller that is cancelled
        leaves no process behind.
        """
        if run_folder is None:
            raise NotExplainedError("not_recorded", "this server does not record its runs, so nothing can be explained")
        num_pending, num_own = self._pending.total(), self._pending[owner] if owner else 0
        if num_pending >= self._max_pending or num_own >= self._max_per_owner:
            whose = " by this key" if num_pending < self._max_pending else ""
            raise NotExplainedError(
                "too_many", f"{num_own if whose else num_pending} explanations are asked for already{whose}; try again"
            )
        self._pending[owner] += 1
        try:
            async with self._running:
                answer = await self._ask(ExplainRequest(run_folder=str(run_folder), requests=requests))
        finally:
            self._pending[owner] -= 1
            if not self._pending[owner]:
                del self._pending[owner]
        if answer.reason is not None:
            raise NotExplainedError(answer.reason, answer.error)
        return answer

    async def _ask(self, question: ExplainRequest) -> ExplainResponse:
        try:
            answer = await ask_child(
                self._processes, WORKER_MODULE, msgspec.json.encode(question), timeout_seconds=self._timeout_seconds
            )
        except TimeoutError:
            raise NotExplainedError(
                "too_long",
                f"the explanation took longer than {self._timeout_seconds:g} s; `eventlm explain` beside the trace "
                "takes the time it needs",
            ) from None
        try:
            return msgspec.json.decode(answer.data, type=ExplainResponse)
        except msgspec.DecodeError as error:
            log.error("a process that explains a reply died", exit_code=answer.exit_code, complaint=answer.complaint)
            raise NotExplainedError("failed", "the explanation failed") from error
