"""Replies of `/api/chat` and `/api/generate`: a JSON object, or a stream of them, one a line."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from eventlm.engine.request import Request
from eventlm.server.errors import ApiError, ErrorForm
from eventlm.server.model_card import rfc3339
from eventlm.server.ollama.options import OllamaFields
from eventlm.server.openai.chat import call_id
from eventlm.server.openai.logprobs import chat_logprobs
from eventlm.server.openai.replies import TokenLogprob
from eventlm.server.reply_format import LINES, ReplyIdentity, StreamFormat
from eventlm.server.timings import EventlmReply, with_timings
from eventlm.text.choice_output import ApiFinishReason, ChoiceOutput, api_finish_reason
from eventlm.text.generation import Generation
from eventlm.text.tokenizer import Tokenizer
from eventlm.text.tools.formats import Formats
from eventlm.text.tools.message import CallDelta, MessageParser, message_format
from eventlm.text.tools.parser_events import CallEnd, Content, Reasoning


class OllamaError(Struct, frozen=True):
    """An error, as a reply or as the last line of a stream."""

    error: str


#: Of all paths below /api/.
OLLAMA_ERRORS = ErrorForm(OllamaError, lambda error, _: OllamaError(str(error)))


class OllamaFunction(Struct, kw_only=True):
    """A called function with its arguments. index: the number of the call in a reply."""

    name: str
    arguments: dict[str, Any] = {}
    index: int | None = None


class OllamaToolCall(Struct, omit_defaults=True, kw_only=True):
    """A call of a tool. Ids are optional."""

    function: OllamaFunction
    id: str | None = None


class OllamaReply(Struct, frozen=True, kw_only=True):
    """What every reply and line has. Durations are in ns; `load_duration` is 0, since the model is loaded already.

    From `done_reason` on: in a whole reply and in the last line of a stream.
    """

    model: str
    created_at: str
    done: bool
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    eventlm: EventlmReply | UnsetType = UNSET


class OllamaReplies(StreamFormat):
    """Replies to one request. Thinking, content and calls are in lines of their own.

    A call comes when it is whole. One that the text's end cuts, and one whose arguments are no JSON object, is content.
    """

    framing = LINES

    def __init__(
        self,
        body: OllamaFields,
        tokenizer: Tokenizer,
        group: Sequence[Request],
        identity: ReplyIdentity,
        formats: Formats,
    ) -> None:
        super().__init__(tokenizer, identity)
        [request] = group
        self._body = body
        self._parser = MessageParser(message_format(request), formats)
        #: The call that is not complete yet.
        self._call: CallDelta | None = None
        self._reason: ApiFinishReason = "stop"

    @abstractmethod
    def line(
        self, *, content: str = "", thinking: str = "", calls: Sequence[OllamaToolCall] = (), **fields: Any
    ) -> Any:
        """A reply or line. fields: those of `OllamaReply` beyond `fixed_fields`."""

    def fixed_fields(self) -> dict[str, Any]:
        """The fields that are the same in all lines."""
        return {"model": self._body.model, "created_at": rfc3339(self.identity.created)}

    def events(self, output: ChoiceOutput, generation: Generation) -> Sequence[Any]:
        parts = self._parts(output)
        logprobs = self._logprobs(output)
        if logprobs is not UNSET:
            # Of all tokens of this output, so they come once, and even if its text is held back.
            parts = [{**(parts[0] if parts else {}), "logprobs": logprobs}, *parts[1:]]
        return [self.line(done=False, **part) for part in parts]

    def end(self, generation: Generation) -> Sequence[Any]:
        line = self.line(done=True, **self._statistics(generation))
        return [with_timings(line, generation.rows) if self._body.wants_timings else line]

    def failure(self, error: ApiError) -> Sequence[Any]:
        return [OllamaError(str(error))]

    async def whole(self, choices: Sequence[ChoiceOutput], generation: Generation) -> Any:
        [output] = choices
        parts = self._parts(output)
        return self.line(
            content="".join(part.get("content", "") for part in parts),
            thinking="".join(part.get("thinking", "") for part in parts),
            calls=[call for part in parts for call in part.get("calls", [])],
            logprobs=self._logprobs(output),
            done=True,
            **self._statistics(generation),
        )

    def _parts(self, output: ChoiceOutput) -> list[dict[str, Any]]:
        """What the next output adds to the message, as arguments of `line`."""
        found: list[dict[str, Any]] = []
        if output.finished is not None:
            self._reason = api_finish_reason(output.finished.reason)
        for part in self._parser.take(output):
            if isinstance(part, Content):
                _add(found, "content", part.text)
            elif isinstance(part, Reasoning):
                _add(found, "thinking", part.text)
            elif isinstance(part, CallEnd):
                self._add_call(found, end="}")
            elif part.name:
                self._call = part
            elif self._call is not None:
                self._call.arguments += part.arguments
        if output.finished is not None:
            self._add_call(found, end="")
        return found

    def _add_call(self, parts: list[dict[str, Any]], end: str) -> None:
        """Add the last call, if it is not there yet. end: its last character, empty if it was cut short."""
        call, self._call = self._call, None
        if call is None:
            return
        arguments = _arguments(call.arguments) if end else None
        if arguments is None:
            _add(parts, "content", f'{{"name": "{call.name}", "arguments": {call.arguments}{end}')
            return
        function = OllamaFunction(name=call.name, arguments=arguments, index=call.index)
        _add(parts, "calls", [OllamaToolCall(id=call_id(self.identity.reply_id, 0, call.index), function=function)])

    def _logprobs(self, output: ChoiceOutput) -> list[TokenLogprob] | UnsetType:
        found = chat_logprobs(self._tokenizer, output, as_token_ids=False)
        return UNSET if found is None else found.content

    def _statistics(self, generation: Generation) -> dict[str, Any]:
        counts = generation.token_counts()
        found = {
            "done_reason": "length" if self._reason == "length" else "stop",
            "prompt_eval_count": counts.prompt,
            "eval_count": counts.completion,
        }
        if (row := generation.rows.get(0)) is not None:
            # Clients divide by the two times, which may be 0 here if there is only one token.
            found |= {
                "total_duration": row.request_e2e_time,
                "load_duration": 0,
                "prompt_eval_duration": max(row.request_prefill_time or 0, 1),
                "eval_duration": max(row.request_decode_time or 0, 1),
            }
        return found


def _add(parts: list[dict[str, Any]], kind: str, value: Any) -> None:
    """Add text or calls to the last part, if it is of this kind, or as a new one."""
    if parts and kind in parts[-1]:
        parts[-1][kind] += value
    elif value:
        parts.append({kind: value})


def _arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call; None if they are not a JSON object."""
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
