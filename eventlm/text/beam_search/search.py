"""Beam search with an engine's ordinary requests, so it is scheduled, recorded and replayed like everything else.

Each beam follows a branch: a greedy request whose tokens are the beam's own for as long as its likeliest continuation
is kept. A beam that takes another token starts a branch of its own, and the prefix cache has most of its prompt. A
branch that no beam follows is cancelled. So a step costs a decode for each beam, and requests only where beams part.
The first request, the root, is not: it stands for the search in all that counts requests, and its few tokens end it.

To the reader of its outputs a search is one request: when it is over, the outputs of its `n` best beams come at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import structlog
from msgspec import structs

from eventlm.engine.request import (
    BY_OWNER,
    PRUNED,
    EngineUnavailableError,
    FinishedOutput,
    OnOutput,
    Put,
    Request,
    RequestHandle,
    RequestOutput,
    Submission,
    TakenOver,
    TokensOutput,
    UnknownReplyError,
)
from eventlm.errors import EventLMError
from eventlm.metrics.rows import RequestRow
from eventlm.sampling_params import SamplingParams
from eventlm.text.beam_search.beams import Beam, Beams, Hypothesis, Top
from eventlm.text.engine import Engine
from eventlm.types import FinishReason

#: Most tokens of a branch. While a beam waits for others, its branch runs ahead, and that may be for nothing.
BRANCH_TOKENS = 8

#: Searches that run: an event loop alone does not keep its tasks.
_running: set[asyncio.Task[None]] = set()

_log = structlog.get_logger("eventlm.text")


class _EndedError(Exception):
    """A branch ended before its time, and the search with it."""

    def __init__(self, reason: FinishReason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason: FinishReason = reason
        self.detail = detail


class _Branch:
    """A request of a search for up to `num_left` tokens; each comes with the likeliest ones in its place.

    tokens: those that have come and that no beam has used yet.
    """

    __slots__ = ("finished", "handle", "is_cancelled", "num_left", "tokens")

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left
        self.tokens: deque[tuple[int, Top]] = deque()
        self.handle: RequestHandle | None = None
        self.finished: FinishedOutput | None = None
        self.is_cancelled = False

    def cancel(self, reason: str) -> None:
        """End the request; nothing if that was done before."""
        if self.handle is not None and not self.is_cancelled:
            self.is_cancelled = True
            self.handle.cancel(reason)

    def take(self) -> tuple[int, Top]:
        """The next token."""
        self.num_left -= 1
        return self.tokens.popleft()


class BeamSearch:
    """The search of one request. put: gets its outputs. submit: submits further requests of it."""

    def __init__(
        self,
        request: Request,
        put: Put,
        submit: Callable[[Sequence[Request], OnOutput], Awaitable[list[RequestHandle]]],
        now_ns: Callable[[], int],
    ) -> None:
        assert request.beams is not None
        params = request.sampling
        self._request = request
        self._put = put
        self._submit = submit
        self._now_ns = now_ns
        self._ends = frozenset((*(params.stop_token_ids or ()), *(() if params.ignore_eos else params.eos_token_ids)))
        self._beams = Beams(
            width=request.beams.width,
            length_penalty=request.beams.length_penalty,
            max_tokens=request.max_tokens,
            ends=self._ends,
            min_tokens=params.min_tokens,
            num_top=params.logprobs or 0,
        )
        self._news = asyncio.Event()
        self._cancelled_by = ""
        self._error: EventLMError | None = None
        self._root, self.root_request = self._branch(self._beams.live[0])
        #: Of the live beams, in their order.
        self._followed = [self._root]
        self._unfinished = {self._root}

    async def run(self, root: RequestHandle) -> None:
        """Search. root: the handle of the root's request, which is submitted."""
        self._root.handle = root
        outputs: list[RequestOutput]
        try:
            await self._search()
            await self._end(PRUNED)
            outputs = self._best()
        except _EndedError as end:
            await self._end(self._cancelled_by or PRUNED)
            outputs = [
                FinishedOutput(index, end.reason, 0, self._cached_tokens, detail=end.detail)
                for index in range(self._request.n)
            ]
        except EventLMError as error:
            await self._end(PRUNED)
            self._put(error)
            return
        except Exception:
            _log.exception("a beam search failed: this is a defect, please report it")
            await self._end(PRUNED)
            self._put(EngineUnavailableError("the search failed; see the server's log"))
            return
        for output in outputs:
            self._put(output)

    def cancel(self, request: int, reason: str) -> None:
        """End the search."""
        if not self._cancelled_by:
            self._cancelled_by = reason
            self._news.set()

    def take_root(self, output: RequestOutput | TakenOver | EventLMError) -> None:
        """Take an output of the root's request."""
        self._take(self._root, output)

    async def _search(self) -> None:
        while True:
            await self._until(lambda: all(branch.tokens for branch in self._followed))
            parents = dict(zip(self._beams.live, self._followed, strict=True))
            taken = {beam: branch.take() for beam, branch in parents.items()}
            self._beams.advance([top for _, top in taken.values()])
            if self._beams.is_over:
                return
            new: list[tuple[_Branch, Request]] = []
            self._followed = []
            for beam in self._beams.live:
                assert beam.parent is not None
                branch = parents[beam.parent]
                if beam.token_id != taken[beam.parent][0] or not branch.num_left:
                    new.append(self._branch(beam))
                    branch = new[-1][0]
                self._followed.append(branch)
            self._prune()
            await self._start(new)

    async def _start(self, new: Sequence[tuple[_Branch, Request]]) -> None:
        """Submit the requests of new branches as one group."""
        if not new:
            return
        branches = [branch for branch, _ in new]
        self._unfinished.update(branches)
        try:
            handles = await self._submit(
                [request for _, request in new], lambda index, output: self._take(branches[index], output)
            )
        except BaseException as error:
            self._unfinished.difference_update(branches)
            if isinstance(error, UnknownReplyError):
                # Its owner has ended it between two groups.
                raise _EndedError("cancelled", BY_OWNER) from error
            raise
        for branch, handle in zip(branches, handles, strict=True):
            branch.handle = handle

    def _branch(self, beam: Beam) -> tuple[_Branch, Request]:
        """A branch that begins where a beam is, and its request."""
        params, scheduling = self._request.sampling, self._request.scheduling
        num_left = min(BRANCH_TOKENS, self._request.max_tokens - beam.length)
        branch = _Branch(num_left)
        scheduling = structs.replace(scheduling, has_text_ends=False)
        if beam.parent is not None:
            assert self._root.handle is not None
            now_ns = self._now_ns()
            scheduling = structs.replace(
                scheduling,
                parent=self._root.handle.request,
                received_ns=now_ns,
                ready_ns=now_ns,
                # The search was admitted with all its beams, and its first token was either in time or not. From now on
                # its steps are those of a running request.
                offline=True,
                deadline_ns=0,
                drop_if_late=False,
                slo_ttft_ns=scheduling.slo_tpot_ns,
            )
        return branch, Request(
            prompt_token_ids=self._request.prompt_token_ids + beam.token_ids(),
            sampling=SamplingParams(
                temperature=0.0,
                seed=params.seed,
                max_tokens=num_left,
                min_tokens=min(max(params.min_tokens - beam.length, 0), num_left),
                logprobs=max(self._beams.num_candidates, params.logprobs or 0),
                stop_token_ids=params.stop_token_ids,
                ignore_eos=params.ignore_eos,
                eos_token_ids=params.eos_token_ids,
            ),
            cache_salt=self._request.cache_salt,
            scheduling=scheduling,
        )

    def _take(self, branch: _Branch, output: RequestOutput | TakenOver | EventLMError) -> None:
        if isinstance(output, TokensOutput):
            assert output.logprobs is not None
            tops = map(Top, output.logprobs.top_ids, output.logprobs.top_logprobs)
            branch.tokens.extend(zip(output.token_ids, tops, strict=True))
        elif isinstance(output, FinishedOutput):
            branch.finished = output
            self._unfinished.discard(branch)
        elif isinstance(output, EventLMError):
            self._error = output
            self._unfinished.clear()
        self._news.set()

    async def _until(self, is_there: Callable[[], bool]) -> None:
        """Wait for outputs. Raises what ends the search meanwhile."""
        while True:
            self._news.clear()
            if self._error is not None:
                raise self._error
            if self._cancelled_by:
                raise _EndedError("cancelled", self._cancelled_by)
            if is_there():
                return
            for branch in self._followed:
                if branch.finished is not None and not branch.tokens:
                    raise _EndedError(branch.finished.reason, branch.finished.detail)
            await self._news.wait()

    def _prune(self) -> None:
        """Cancel the branches that no beam follows."""
        for branch in self._unfinished.difference(self._followed, {self._root}):
            branch.cancel(PRUNED)

    async def _end(self, reason: str) -> None:
        """End all branches and wait until they are over: nothing is left of the search, and all it used is counted."""
        for branch in self._unfinished if reason != PRUNED else self._unfinished - {self._root}:
            branch.cancel(reason)
        while self._unfinished:
            if self._cancelled_by:
                self._root.cancel(self._cancelled_by)
            self._news.clear()
            await self._news.wait()

    @property
    def _cached_tokens(self) -> int:
        return 0 if self._root.finished is None else self._root.finished.cached_tokens

    def _best(self) -> list[RequestOutput]:
        """The outputs of the best beams."""
        outputs: list[RequestOutput] = []
        for index, (_, beam, _) in enumerate(self._beams.complete[: self._request.n]):
            logprobs = None if self._request.sampling.logprobs is None else beam.token_logprobs()
            outputs.append(TokensOutput(index, 0, beam.token_ids(), logprobs))
        for index, hypothesis in enumerate(self._beams.complete[: self._request.n]):
            reason = self._finish_reason(hypothesis)
            position = hypothesis.beam.length
            outputs.append(
                FinishedOutput(index, reason, position, self._cached_tokens, self._row(index, reason, position))
            )
        return outputs

    def _finish_reason(self, hypothesis: Hypothesis) -> FinishReason:
        if not hypothesis.ends:
            return "length"
        return "stop_token" if hypothesis.beam.token_id in (self._request.sampling.stop_token_ids or ()) else "eos"

    def _row(self, index: int, reason: FinishReason, num_tokens: int) -> RequestRow | None:
        """What a beam's choice reports of its times: the search began as its first request did and ends now."""
        root = None if self._root.finished is None else self._root.finished.row
        if root is None:
            return None
        now_ns = self._now_ns()
        e2e_ns = root.edge_ns + now_ns - root.arrived_ns
        decode_ns = e2e_ns - (root.prefill_e2e_time or 0)
        return structs.replace(
            root,
            index=index,
            reason=reason,
            finished_ns=now_ns,
            output_tokens=num_tokens,
            request_e2e_time=e2e_ns,
            request_decode_time=decode_ns,
            request_time_per_output_token=decode_ns // (num_tokens - 1) if num_tokens > 1 else None,
        )


async def submit_searches(
    engine: Engine, group: Sequence[Request], *, submission: Submission | None, on_output: OnOutput
) -> list[RequestHandle]:
    """As `Engine.submit` for a group whose requests all have `beams`: the handles end and report on searches."""
    further: Submission | None = None
    if submission is not None:
        further = structs.replace(submission, goes_on=True)
        submission = structs.replace(
            submission,
            search_tokens=sum(map(_most_tokens, group)),
            search_choices=sum(each.n for each in group),
            search_sequences=sum(each.beams.width for each in group if each.beams is not None),
        )
    submit = partial(_submit_further, engine, further)
    searches = [BeamSearch(each, partial(on_output, index), submit, engine.now_ns) for index, each in enumerate(group)]
    roots = await engine.submit(
        [search.root_request for search in searches],
        submission=submission,
        on_output=lambda index, output: searches[index].take_root(output),
    )
    task = asyncio.create_task(_run(engine, submission, searches, roots))
    _running.add(task)
    task.add_done_callback(_running.discard)
    handles = [
        RequestHandle(root.request, request.n, _ignore, search.cancel)
        for root, request, search in zip(roots, group, searches, strict=True)
    ]
    handles[0].rate_limits = roots[0].rate_limits
    return handles


def _most_tokens(request: Request) -> int:
    assert request.beams is not None
    return len(request.prompt_token_ids) + request.beams.width * request.max_tokens


async def _submit_further(
    engine: Engine, submission: Submission | None, group: Sequence[Request], on_output: OnOutput
) -> list[RequestHandle]:
    return await engine.submit(group, submission=submission, on_output=on_output)


async def _run(
    engine: Engine, submission: Submission | None, searches: Sequence[BeamSearch], roots: Sequence[RequestHandle]
) -> None:
    try:
        await asyncio.gather(*(search.run(root) for search, root in zip(searches, roots, strict=True)))
    finally:
        if submission is not None:
            engine.leave(submission.reply_id, 0)


def _ignore(*_: object) -> None:
    """A search finds its ends itself."""
