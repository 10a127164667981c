"""What answers in a chat: an engine of this process, or a server of OpenAI's API.

Both are used in `async with`, and raise an EventLMError for what can go wrong. `opening` says what is done while a chat
opens; the last deltas of an answer have a finish reason and usage, and leaving it early ends it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self

import msgspec

from eventlm.bootstrap.composition import Composition
from eventlm.cli.engine_command import start_engine
from eventlm.client.sse import StreamDelta, TokenUsage
from eventlm.errors import EventLMError, UsageError
from eventlm.text.choice_output import api_finish_reason
from eventlm.text.decoding import decode_request
from eventlm.text.generation import Generation, submit
from eventlm.text.protocol import UNSUPPORTED_IN_CHAT, ChatCompletionRequest
from eventlm.text.request_builder import RequestBuilder
from eventlm.text.tools.formats import find_formats
from eventlm.text.tools.message import MessageParser, message_format

Messages = list[dict[str, str]]


class LocalBackend:
    """The engine of a composition, which it starts and stops. Requests follow the rules of the HTTP API."""

    def __init__(self, composed: Composition) -> None:
        if composed.tokenizer.chat_template is None:
            raise UsageError("this model has no chat template; choose a model that was made for chat")
        engine = composed.engine
        self._engine = engine
        self._tokenizer = composed.tokenizer
        self._formats = find_formats(engine.setup.config.server, composed.tokenizer.chat_template)
        self._requests = RequestBuilder(
            engine,
            composed.tokenizer,
            defaults=composed.defaults,
            vocab_size=composed.vocab_size,
            formats=self._formats,
        )
        self.model = engine.model_names[0]
        self.opening = f"loading {self.model}"

    @property
    def max_model_len(self) -> int:
        """The engine's, once it has started."""
        return self._engine.max_model_len

    @property
    def run_folder(self) -> Path | None:
        """Where the run is recorded, if it is."""
        return self._engine.run_folder

    async def __aenter__(self) -> Self:
        try:
            await start_engine(self._engine)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self._requests.close()
        await self._engine.stop()

    def check(self, parameters: dict[str, Any]) -> None:
        """Raise InputError as the HTTP API would."""
        self._requests.params(self._body([{"role": "user", "content": "."}], parameters))

    async def answer(self, messages: Messages, parameters: dict[str, Any]) -> AsyncGenerator[StreamDelta]:
        """Raises InputError, and what `InferenceEngine.submit` raises."""
        received_ns = self._engine.now_ns()
        request = await self._requests.chat(self._body(messages, parameters), received_ns)
        parser = MessageParser(message_format(request), self._formats)
        generation = await submit(self._engine, self._tokenizer, [request], formats=self._formats)
        try:
            async with aclosing(_deltas(generation, parser)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            generation.cancel()

    def _body(self, messages: Messages, parameters: dict[str, Any]) -> ChatCompletionRequest:
        raw = msgspec.json.encode({"model": self.model, "messages": messages, **parameters})
        return decode_request(raw, ChatCompletionRequest, UNSUPPORTED_IN_CHAT)


async def _deltas(generation: Generation, parser: MessageParser) -> AsyncGenerator[StreamDelta]:
    async with aclosing(generation.outputs()) as outputs:
        async for output in outputs:
            reason = None
            if output.finished is not None:
                if (error := output.error) is not None:
                    raise error
                reason = api_finish_reason(output.finished.reason)
            message = parser.message(output)
            received_ns = time.monotonic_ns()
            yield StreamDelta(output.choice, message.content, reason, None, received_ns, message.reasoning)
    counts = generation.token_counts()
    usage = TokenUsage(counts.prompt, counts.completion, counts.prompt + counts.completion)
    yield StreamDelta(0, "", None, usage, time.monotonic_ns())


class RemoteBackend:
    """The server at `url`; `model` empty takes the first that it serves."""

    def __init__(self, url: str, *, api_key: str = "", model: str = "") -> None:
        # Only here: a model of this process needs no HTTP client.
        from eventlm.client.openai_client import OpenAIClient

        self._client = OpenAIClient(url, api_key=api_key)
        self.model = model
        #: Not known.
        self.max_model_len = 0
        #: The server records, not the chat.
        self.run_folder: Path | None = None
        self.opening = f"connecting to {self._client.url}"

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        try:
            if not self.model:
                self.model = await self._first_model()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.__aexit__(None, None, None)

    def check(self, parameters: dict[str, Any]) -> None:
        """The server checks them when it is asked."""

    def answer(self, messages: Messages, parameters: dict[str, Any]) -> AsyncGenerator[StreamDelta]:
        """Raises ClientError."""
        body = {"model": self.model, "messages": messages, "stream_options": {"include_usage": True}, **parameters}
        return self._client.stream_chat(body)

    async def _first_model(self) -> str:
        models = await self._client.models()
        if not models:
            raise EventLMError(f"{self._client.url} serves no model; name one with --model")
        return models[0]


ChatBackend = LocalBackend | RemoteBackend
