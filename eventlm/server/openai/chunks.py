"""Streams of chunks as OpenAI's chats and completions have them: openings, deltas, ends, usage and `[DONE]`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Raw, UnsetType, structs

from eventlm.server.errors import ApiError
from eventlm.server.openai.replies import TokenIds, Usage
from eventlm.server.reply_format import ReplyIdentity, StreamFormat
from eventlm.server.timings import with_timings
from eventlm.text.choice_output import ChoiceOutput
from eventlm.text.echo import Echo
from eventlm.text.generation import Generation
from eventlm.text.protocol import GenerationRequest, StreamOptions
from eventlm.text.tokenizer import Tokenizer

DONE = Raw(b"[DONE]")


class ChunkedReplies(StreamFormat):
    """Replies whose stream is a list of chunks, each of one choice."""

    def __init__(
        self, body: GenerationRequest, tokenizer: Tokenizer, identity: ReplyIdentity, echoes: Sequence[Echo] = ()
    ) -> None:
        super().__init__(tokenizer, identity, echoes)
        options = body.stream_options or StreamOptions()
        self._includes_usage = bool(options.include_usage)
        self._includes_timings = body.wants_timings
        # As vLLM does: without include_usage there is none in any chunk.
        self._has_usage_so_far = self._includes_usage and bool(options.continuous_usage_stats)
        #: Chunks of a stream that will report its usage have a null until then.
        self._no_usage: UnsetType | None = None if self._includes_usage else UNSET
        self._returns_token_ids = bool(body.return_token_ids)

    @abstractmethod
    def opening(self, choice: int) -> Any | None:
        """The chunk before a choice's text, if the endpoint has one."""

    @abstractmethod
    def delta(self, output: ChoiceOutput) -> Any | None:
        """A chunk for an output; None if its text is held back."""

    @abstractmethod
    def finish(self, output: ChoiceOutput) -> Any:
        """A choice's last chunk, without text."""

    @abstractmethod
    def usage(self, usage: Usage) -> Any:
        """The stream's last chunk, if the client asked for it."""

    def begin(self, generation: Generation) -> Sequence[Any]:
        chunks = [(self.opening(choice), choice) for choice in range(generation.num_choices)]
        return [
            self._with_usage(chunk, generation.beginning(choice), generation)
            for chunk, choice in chunks
            if chunk is not None
        ]

    def events(self, output: ChoiceOutput, generation: Generation) -> Sequence[Any]:
        chunks = [self.delta(output)]
        if output.finished is not None:
            chunks.append(self.finish(output))
        return [self._with_usage(chunk, output, generation) for chunk in chunks if chunk is not None]

    def end(self, generation: Generation) -> Sequence[Any]:
        if not self._includes_usage and not self._includes_timings:
            return [DONE]
        chunk = self.usage(Usage.of(generation.token_counts()))
        if not self._includes_usage:
            chunk = structs.replace(chunk, usage=UNSET)
        return [with_timings(chunk, generation.rows) if self._includes_timings else chunk, DONE]

    def failure(self, error: ApiError) -> Sequence[Any]:
        return [error.envelope, DONE]

    def _with_usage(self, chunk: Any, output: ChoiceOutput, generation: Generation) -> Any:
        """A chunk, with the usage of its choice so far if that was asked for."""
        if not self._has_usage_so_far:
            return chunk
        return structs.replace(chunk, usage=Usage.of(generation.token_counts_of(output)))

    def _token_ids(self, output: ChoiceOutput) -> TokenIds:
        return output.token_ids if self._returns_token_ids else UNSET
