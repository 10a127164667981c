"""aiohttp's connections, with limits on their number and on the time that a client may take."""

from __future__ import annotations

import asyncio
import logging
import re
from http import HTTPStatus
from typing import cast

import structlog
from aiohttp import StreamReader, web

from eventlm.config import ServerConfig
from eventlm.server.errors import ApiError, internal_error, timed_out, unavailable
from eventlm.system.chance import Chance
from eventlm.system.system import System
from eventlm.text.protocol import REQUEST_ID_PATTERN

REQUEST_ID_HEADER = "x-request-id"
#: aiohttp's default has its version and Python's.
SERVER_NAME = "eventlm"
#: Ids that are echoed. Others are replaced, so that logs and headers stay clean.
SANE_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)
_log = structlog.get_logger("eventlm.server")
#: aiohttp logs whatever goes wrong on a connection at the level error.
_quiet = logging.getLogger("eventlm.server.aiohttp")

#: How long an unwanted body is still read, so that its client gets the reply before the connection ends.
LINGER_SECONDS = 5.0
#: One of so many refused connections is logged.
_REFUSALS_PER_LINE = 1000


def request_id(chance: Chance, request: web.BaseRequest) -> str:
    """The client's id for the request if it sent a valid one, else a fresh one."""
    sent = request.headers.get(REQUEST_ID_HEADER, "")
    return sent if SANE_REQUEST_ID.fullmatch(sent) else chance.identity("req-")


class Gate:
    """Counts the connections of one server; `connect` makes the next."""

    def __init__(self, system: System, config: ServerConfig, manager: web.Server) -> None:
        self.chance = system.chance
        self.config = config
        self.num_open = 0
        #: Connections whose TLS handshake is under way.
        self.handshakes: set[Connection] = set()
        self.num_refused = 0
        self._manager = manager
        self._loop = asyncio.get_running_loop()

    @property
    def num_connections(self) -> int:
        """Open connections and TLS handshakes."""
        return self.num_open + len(self.handshakes)

    def connect(self) -> Connection:
        """The protocol of an accepted connection."""
        return Connection(self, self._manager, self._loop)

    def note_refusal(self) -> None:
        """One connection too many."""
        self.num_refused += 1
        if self.num_refused % _REFUSALS_PER_LINE == 1:
            _log.warning("too many connections", max_connections=self.config.max_connections, refused=self.num_refused)


class Connection(web.RequestHandler):
    """Serves one connection.

    Invalid HTTP is answered with the error envelope too. A client has `header_timeout_seconds` for the head of each
    request, from the start of the connection or the head's first byte, `idle_timeout_seconds` between requests, and
    `write_timeout_seconds` to read something while data waits for it. Handlers limit the time for a body.
    """

    __slots__ = (
        "_body",
        "_gate",
        "_head_timer",
        "_num_heads",
        "_num_replies",
        "_num_waiting",
        "_refused",
        "_write_timer",
    )

    def __init__(self, gate: Gate, manager: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            manager,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]
            logger=_quiet,
            keepalive_timeout=gate.config.idle_timeout_seconds,
            lingering_time=LINGER_SECONDS,
            # aiohttp's errors do not name the encodings that are accepted.
            auto_decompress=False,
        )
        self._gate = gate
        self._refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        #: Bytes that waited for the client when the timer was set.
        self._num_waiting = 0
        self._num_heads = 0
        self._num_replies = 0
        #: Of the last request.
        self._body: StreamReader | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        gate = self._gate
        gate.handshakes.discard(self)
        gate.num_open += 1
        if gate.num_open > gate.config.max_connections:
            self._refused = True
            gate.note_refusal()
            error = unavailable("The server has as many connections as it may have; try again.")
            cast(asyncio.Transport, transport).write(_raw_reply(self._gate.chance, error))
            cast(asyncio.Transport, transport).close()
            return
        super().connection_made(transport)
        # Writers wait until all has left; streams set a higher limit.
        cast(asyncio.Transport, transport).set_write_buffer_limits(high=0)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        is_of_body = self._body is not None and not self._body.is_eof()
        super().data_received(data)
        if self._request_count != self._num_heads:
            self._note_heads()
        elif data and self._num_replies == self._num_heads and not is_of_body and self._head_timer is None:
            # All requests are answered, so this is the start of the next head. aiohttp passes no bytes when it goes on
            # with those that it has kept.
            self._await_head()

    def _note_heads(self) -> None:
        """The heads of some requests are complete."""
        self._num_heads = self._request_count
        self._body = self._messages[-1][1]
        self._stop_timer()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._num_replies += 1
            if self._request_count != self._num_heads:
                # They followed a request to upgrade, which is declined by now.
                self._note_heads()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._gate.num_open -= 1
        self._stop_timer()
        self._stop_write_timer()
        if not self._refused:
            super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _watch_reader(self) -> None:
        assert self.transport is not None
        self._num_waiting = self.transport.get_write_buffer_size()
        self._write_timer = self._loop.call_later(self._gate.config.write_timeout_seconds, self._check_reader)

    def _check_reader(self) -> None:
        """Disconnect a client that has read nothing; one that has read anything gets more time."""
        self._write_timer = None
        if self.transport is None:
            return
        if self.transport.get_write_buffer_size() < self._num_waiting:
            self._watch_reader()
        else:
            _log.info("a client that read nothing was disconnected", seconds=self._gate.config.write_timeout_seconds)
            self.transport.abort()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _await_head(self) -> None:
        self._head_timer = self._loop.call_later(self._gate.config.header_timeout_seconds, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        """The head of a request did not come in time."""
        self._head_timer = None
        if self.transport is not None:
            seconds = self._gate.config.header_timeout_seconds
            self.transport.write(
                _raw_reply(self._gate.chance, timed_out(f"The head of a request did not come within {seconds} s."))
            )
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the reply has begun, an error can no longer be sent")
        error = internal_error()
        if status < 500:
            error = ApiError(status, f"The request is not valid HTTP: {(message or 'bad request').strip()}")
        response = error.to_response()
        response.headers[REQUEST_ID_HEADER] = identity = request_id(self._gate.chance, request)
        response.headers["Server"] = SERVER_NAME
        response.force_close()
        _log.info("bad request", request_id=identity, status=status, error=type(exc).__name__)
        return response


def _raw_reply(chance: Chance, error: ApiError) -> bytes:
    """An error for a client that has sent no request."""
    body = error.to_json()
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        REQUEST_ID_HEADER: chance.identity("req-"),
        **error.headers,
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
