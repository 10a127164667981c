"""The lines of a batch: requests in its input, and what became of each in its output and error files.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": ..., "messages": [...]}}

    {"id": "batch_req_..._1", "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": {...}},
     "error": null}

The id of an output line ends with the number of its input line, from 1. So the files themselves say which lines are
over, and a batch that was interrupted goes on with the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Raw, Struct

from eventlm.errors import InputError, InvalidJsonError
from eventlm.server.errors import ApiError, ErrorEnvelope
from eventlm.system.disk import ReadableFile
from eventlm.text.decoding import decode_request

#: OpenAI's.
MAX_ID_LENGTH = 512


class LineFields(Struct):
    """A line as it must be."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_LENGTH)]
    method: str
    url: str
    body: dict[str, object]


class _InputBody(Struct):
    """The body of a line as its bytes."""

    body: Raw


class _InputId(Struct):
    """What can be known of a line that is wrong."""

    custom_id: str | None = None


class LineError(Struct, frozen=True, kw_only=True):
    """Why a line has no response. line: its number."""

    code: str
    message: str
    param: str | None = None
    line: int


class InputLine(NamedTuple):
    """A line of the input. number: from 1. error: what is wrong with it; it has no url and no body then."""

    number: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    error: LineError | None = None


class LineResponse(Struct, frozen=True):
    """The reply to a line: as the endpoint would have answered. request_id: also of the request in the trace's log."""

    status_code: int
    request_id: str
    body: Raw


class OutputLine(Struct, frozen=True, kw_only=True):
    """What became of a line: a response of any status, or why there is none."""

    id: str
    custom_id: str | None
    response: LineResponse | None = None
    error: LineError | None = None

    @property
    def is_completed(self) -> bool:
        """Whether the request succeeded. All others belong into the error file."""
        return self.response is not None and self.response.status_code == 200

    @property
    def error_message(self) -> str:
        """Why it failed, with the number of its line; empty if it did not."""
        if self.error is not None:
            return self.error.message
        if self.response is None or self.is_completed:
            return ""
        error = msgspec.json.decode(self.response.body, type=ErrorEnvelope).error
        return f"Line {_number(self.id)}: {error.message}"


class _InputTokens(Struct):
    cached_tokens: int | None = None


class _OutputTokens(Struct):
    reasoning_tokens: int | None = None


class ReplyUsage(Struct):
    """Tokens of a reply, under either of OpenAI's names."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _InputTokens | None = None
    completion_tokens_details: _OutputTokens | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _InputTokens | None = None
    output_tokens_details: _OutputTokens | None = None


class _Reply(Struct):
    usage: ReplyUsage | None = None


class _EndedResponse(Struct):
    status_code: int
    body: _Reply


class EndedLine(Struct):
    """An output line as far as it is counted."""

    id: str
    custom_id: str | None = None
    response: _EndedResponse | None = None

    @property
    def number(self) -> int:
        """The number of the input line. Raises ValueError for an id that this program did not make."""
        return _number(self.id)

    @property
    def is_completed(self) -> bool:
        """As that of the OutputLine."""
        return self.response is not None and self.response.status_code == 200

    @property
    def usage(self) -> ReplyUsage | None:
        """The tokens of its reply."""
        return self.response.body.usage if self.response is not None else None


def _number(id: str) -> int:
    return int(id.rpartition("_")[2])


def read_lines(file: ReadableFile, urls: Collection[str], *, endpoint: str = "", max_bytes: int) -> Iterator[InputLine]:
    """The requests in an input file, which is read as they are taken. Empty lines are none.

    urls: what requests may name; endpoint: the only one of them that is allowed, empty for all. max_bytes: of a line.
    """
    seen: set[str] = set()
    number = 0
    while data := file.readline(max_bytes + 1):
        number += 1
        if len(data) > max_bytes and not data.endswith(b"\n"):
            _skip_line(file, max_bytes)
            yield _wrong(number, None, "line_too_long", f"it is larger than the limit of {max_bytes} bytes")
        elif data.strip():
            yield _parse(data, number, urls, endpoint, seen)


def _skip_line(file: ReadableFile, max_bytes: int) -> None:
    while (data := file.readline(max_bytes)) and not data.endswith(b"\n"):
        pass


def _parse(data: bytes, number: int, urls: Collection[str], endpoint: str, seen: set[str]) -> InputLine:
    try:
        fields = decode_request(data, LineFields, {})
    except InvalidJsonError as error:
        detail = str(error).partition(": ")[2]
        return _wrong(number, None, "invalid_json_line", f"it is not valid JSON: {detail}")
    except InputError as error:
        what = str(error).removesuffix(".").replace("The request body", "it")
        return _wrong(number, _custom_id(data), error.code or "invalid_value", what, error.param)
    name = fields.custom_id
    if name in seen:
        return _wrong(
            number, name, "duplicate_custom_id", f"the custom_id '{name}' is that of an earlier line", "custom_id"
        )
    seen.add(name)
    if fields.method != "POST":
        return _wrong(number, name, "invalid_method", f"the method must be POST, got '{fields.method}'", "method")
    if endpoint and fields.url != endpoint:
        what = f"the url must be the batch's endpoint {endpoint}, got '{fields.url}'"
        return _wrong(number, name, "mismatched_endpoint", what, "url")
    if fields.url not in urls:
        what = f"the url must be one of {', '.join(sorted(urls))}, got '{fields.url}'"
        return _wrong(number, name, "invalid_url", what, "url")
    return InputLine(number, name, fields.url, bytes(msgspec.json.decode(data, type=_InputBody).body))


def _custom_id(data: bytes) -> str | None:
    try:
        found = msgspec.json.decode(data, type=_InputId).custom_id
    except msgspec.MsgspecError:
        return None
    return found and found[:MAX_ID_LENGTH]


def _wrong(number: int, custom_id: str | None, code: str, what: str, param: str | None = None) -> InputLine:
    error = LineError(code=code, message=f"Line {number}: {what}.", param=param, line=number)
    return InputLine(number, custom_id, error=error)


def without_response(prefix: str, line: InputLine, error: LineError) -> OutputLine:
    """The output of a line that was not run. prefix: of the ids of the batch's output lines."""
    return OutputLine(id=f"{prefix}{line.number}", custom_id=line.custom_id, error=error)


def with_response(prefix: str, line: InputLine, request_id: str, reply: object) -> OutputLine:
    """The output of a line that was run: with a reply, or with an error in OpenAI's envelope."""
    status, body = (reply.status, reply.to_json()) if isinstance(reply, ApiError) else (200, msgspec.json.encode(reply))
    response = LineResponse(status, request_id, Raw(body))
    return OutputLine(id=f"{prefix}{line.number}", custom_id=line.custom_id, response=response)
