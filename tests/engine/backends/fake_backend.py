"""A backend in memory: what it says and how it answers is decided by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from eventlm.config.backends import BackendSpec
from eventlm.engine.backend import (
    AnswerDelta,
    AnswerEnd,
    AnswerUsage,
    Attempt,
    BackendError,
    BackendFacts,
    BackendLoad,
    Connect,
    ForwardedRequest,
)

Answer = Callable[[Attempt], AsyncGenerator[AnswerDelta | AnswerEnd]]
WORDS = ("one ", "two ", "three ")


async def three_words(attempt: Attempt) -> AsyncGenerator[AnswerDelta | AnswerEnd]:
    """What a backend answers unless a test says otherwise, from where the attempt goes on."""
    for word in WORDS[attempt.num_tokens :]:
        await asyncio.sleep(0)
        yield AnswerDelta(word, 1)
    yield AnswerEnd("stop", AnswerUsage(prompt=7, completion=3 - attempt.num_tokens, cached=2))


def failing(error: BackendError, *, after: int = 0) -> Answer:
    """An answer that fails after so many words."""

    async def answer(attempt: Attempt) -> AsyncGenerator[AnswerDelta | AnswerEnd]:
        for word in WORDS[attempt.num_tokens :][:after]:
            yield AnswerDelta(word, 1)
        raise error

    return answer


def silent_after(number: int) -> Answer:
    """An answer that stops after so many words and never ends."""

    async def answer(attempt: Attempt) -> AsyncGenerator[AnswerDelta | AnswerEnd]:
        for word in WORDS[:number]:
            yield AnswerDelta(word, 1)
        await asyncio.Event().wait()

    return answer


class FakeBackend:
    """attempts: what it was sent. answers: for the next requests, before `answer` for all others. num_open: answers
    that are under way. error: what it answers a probe with. load: what its metrics say.
    """

    def __init__(self, spec: BackendSpec) -> None:
        self.spec = spec
        self.facts = BackendFacts(kind="openai", models=["m"])
        self.attempts: list[Attempt] = []
        self.answers: list[Answer] = []
        self.answer: Answer = three_words
        self.num_open = 0
        self.num_asked = 0
        self.error: BackendError | None = None
        self.load: BackendLoad | None = None
        self.continues = True
        self.is_closed = False

    async def ask(self) -> BackendFacts:
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        return self.facts

    async def read_load(self) -> BackendLoad | None:
        if self.error is not None:
            raise self.error
        return self.load

    def can_continue(self, request: ForwardedRequest, *, is_counted: bool = True) -> bool:
        return self.continues

    async def forward(self, attempt: Attempt) -> AsyncGenerator[AnswerDelta | AnswerEnd]:
        self.attempts.append(attempt)
        answer = self.answers.pop(0) if self.answers else self.answer
        self.num_open += 1
        try:
            async for part in answer(attempt):
                yield part
        finally:
            self.num_open -= 1

    async def close(self) -> None:
        self.is_closed = True


class FakeBackends:
    """Those that an engine has connected to, by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, FakeBackend] = {}

    @property
    def connect(self) -> Connect:
        def make(spec: BackendSpec) -> FakeBackend:
            return self.by_name.setdefault(spec.name, FakeBackend(spec))

        return make

    def __getitem__(self, name: str) -> FakeBackend:
        return self.by_name[name]
