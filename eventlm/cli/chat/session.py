"""One chat: messages go to the backend, answers come to the screen, and the conversation keeps what was said."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from eventlm.cli.chat.backend import ChatBackend
from eventlm.cli.chat.conversation import Conversation, Message
from eventlm.cli.chat.screen import Screen
from eventlm.client.sse import StreamDelta, TokenUsage
from eventlm.errors import EventLMError
from eventlm.formatting import counted
from eventlm.types import NANOSECONDS_PER_SECOND


class ChatAnswer:
    """An answer, as far as it has come."""

    def __init__(self) -> None:
        self.text = ""
        self.finish_reason = ""
        self._num_deltas = 0
        self._usage: TokenUsage | None = None
        self._started_ns = self._first_ns = self._last_ns = time.monotonic_ns()

    def add(self, delta: StreamDelta) -> None:
        """Add a delta."""
        self.text += delta.text
        self.finish_reason = delta.finish_reason or self.finish_reason
        self._usage = delta.usage or self._usage
        if delta.text or delta.reasoning:
            if not self._num_deltas:
                self._first_ns = delta.received_ns
            self._num_deltas += 1
            self._last_ns = delta.received_ns

    @property
    def context_tokens(self) -> int:
        """Tokens of the conversation with this answer; 0 if they are not known."""
        if self._usage is None:
            return 0
        return (self._usage.prompt_tokens or 0) + (self._usage.completion_tokens or 0)

    def summary(self, max_model_len: int) -> str:
        """How fast it came, and how much of the context the conversation takes (`max_model_len` 0: not known).

        An answer that was stopped has no count of tokens; its pieces stand for them.
        """
        num_tokens = (self._usage.completion_tokens if self._usage is not None else None) or self._num_deltas
        parts = [counted(num_tokens, "token")]
        if num_tokens > 1 and self._last_ns > self._first_ns:
            speed = (num_tokens - 1) * NANOSECONDS_PER_SECOND / (self._last_ns - self._first_ns)
            parts.append(f"{speed:.1f} tokens/s")
        parts.append(f"first after {(self._first_ns - self._started_ns) / NANOSECONDS_PER_SECOND:.2f} s")
        if self.context_tokens:
            limit = f" of {max_model_len:,}" if max_model_len else ""
            parts.append(f"context {self.context_tokens:,}{limit}")
        return ", ".join(parts)


class ChatSession:
    """A conversation with `backend` under sampling `parameters`."""

    def __init__(self, backend: ChatBackend, screen: Screen) -> None:
        self.backend = backend
        self.screen = screen
        self.conversation = Conversation()
        self.parameters: dict[str, Any] = {}
        #: The last message whose answer failed, for `/retry`.
        self.unanswered: str | None = None
        #: Files of this chat, which `/save` may write again.
        self.own_files: set[Path] = set()
        self.failed = False
        self._answering: asyncio.Task[None] | None = None

    def fail(self, message: str) -> None:
        """Show an error, which also sets the exit code of a script."""
        self.failed = True
        self.screen.error(message)

    def stop_answer(self) -> bool:
        """End the answer under way and keep what came; False if there is none."""
        return self._answering is not None and self._answering.cancel()

    async def say(self, text: str) -> None:
        """Send a message and show the answer. Both are kept, unless there is no answer at all."""
        self.unanswered = None
        self.conversation.turns.append(Message("user", text))
        answer = ChatAnswer()
        try:
            await self._receive(answer)
        except EventLMError as error:
            self.fail(str(error))
            self._explain(error)
        if answer.text:
            self.conversation.turns.append(Message("assistant", answer.text))
        else:
            self.conversation.turns.pop()
            self.unanswered = text
            self.screen.note("nothing was answered and your message is taken back; /retry sends it again")

    async def _receive(self, answer: ChatAnswer) -> None:
        with self.screen.busy():
            self._answering = asyncio.ensure_future(self._show(answer))
            try:
                await asyncio.wait({self._answering})
                stopped = self._answering.cancelled()
            finally:
                task, self._answering = self._answering, None
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self.screen.end_line()
        if answer.text:
            self.screen.note(self._summary(answer, stopped=stopped))
        if not stopped:
            task.result()

    async def _show(self, answer: ChatAnswer) -> None:
        deltas = self.backend.answer(self.conversation.messages(), self.parameters)
        async with aclosing(deltas) as each:
            async for delta in each:
                answer.add(delta)
                self.screen.thought(delta.reasoning)
                self.screen.text(delta.text)

    def _summary(self, answer: ChatAnswer, *, stopped: bool) -> str:
        limit = self.backend.max_model_len
        ends = []
        if stopped:
            ends.append("stopped")
        elif answer.finish_reason == "length" and limit and answer.context_tokens >= limit:
            ends.append("cut: the context is full; /undo or /clear makes room")
        elif answer.finish_reason == "length":
            ends.append("cut at max_tokens")
        return " · ".join([answer.summary(limit), *ends])

    def _explain(self, error: EventLMError) -> None:
        if "context length" in str(error):
            self.screen.note("the conversation is too long for the model: /undo takes turns back, /clear starts anew")
