"""What goes wrong at a stub backend."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from aiohttp import web

if TYPE_CHECKING:
    from tests.gateway.stub_backend import ChunkWriter

#: More tokens than any answer has.
AT_END = 1 << 31
_DONE = b"data: [DONE]\n\n"


@dataclass
class Fault:
    """Something that goes wrong with each `every`-th request, or those of `numbers`; requests count from 1.

    status: answered in place of a stream, with `retry_after` and `body` if given. late: the answer begins `seconds`
    later. The others come `after` so many tokens: stall: silence; endless: comments without end; cut: the connection is
    reset; end: the stream ends without a finish reason; malformed: an event that is no JSON; error: an event with an
    error; twice: the end comes twice, and then tokens and the end again; absurd: an answer's usage is `count`. hang:
    nothing is answered.
    """

    kind: Literal[
        "status", "late", "stall", "endless", "cut", "end", "malformed", "error", "twice", "absurd", "hang"
    ]  # fmt: skip
    every: int = 1
    numbers: tuple[int, ...] = ()
    after: int = 0
    status: int = 503
    retry_after: str = ""
    body: str = ""
    seconds: float = 0.0
    count: int = 0

    def hits(self, number: int) -> bool:
        """Whether request `number` meets it."""
        return number in self.numbers if self.numbers else number % self.every == 0


def error(status: int, message: str, *, code: str | None = None) -> web.Response:
    """An error in OpenAI's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return web.json_response(body, status=status)


def fault_reply(fault: Fault) -> web.Response:
    """The answer of a fault of kind `status`."""
    headers = {"Retry-After": fault.retry_after} if fault.retry_after else {}
    if fault.body:
        return web.Response(status=fault.status, text=fault.body, headers=headers)
    response = error(fault.status, f"The stub answers {fault.status}.")
    response.headers.update(headers)
    return response


async def go_wrong(
    request: web.Request, response: web.StreamResponse, fault: Fault, chunks: ChunkWriter, reason: str, num_tokens: int
) -> None:
    """Whatever comes after the tokens of an answer, of which there are so many, and which should end for `reason`."""
    match fault.kind:
        case "stall":
            await asyncio.Event().wait()
        case "endless":
            while True:
                await response.write(b": still here\n\n")
                await asyncio.sleep(1)
        case "cut":
            # What was written leaves first.
            await asyncio.sleep(0.01)
            assert request.transport is not None
            request.transport.abort()
        case "malformed":
            await response.write(b'data: {"choices": [{"index"\n\n')
        case "error":
            await response.write(
                b'data: {"error":{"message":"The stub failed.","type":"server_error","code":null}}\n\n'
            )
            await response.write(_DONE)
        case "twice":
            end = chunks.end(reason) + chunks.end(reason) + chunks.usage(num_tokens) + chunks.usage(num_tokens) + _DONE
            await response.write(end + chunks.tokens(["~fff"]) + end)
        case "absurd":
            await response.write(chunks.end(reason) + chunks.usage(fault.count) + _DONE)
