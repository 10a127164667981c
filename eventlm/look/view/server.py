"""The server of the page: its files, the run as the report has it, and the debugger's commands."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from eventlm.errors import EventLMError, UsageError
from eventlm.look.findings.find import find_all
from eventlm.look.report.build import STATIC as REPORT_STATIC
from eventlm.look.report.build import report_data
from eventlm.look.view.access import guard, refuse
from eventlm.page.document import SERVED_HEADERS, served_page
from eventlm.page.linker import link, link_styles
from eventlm.replay.debugger.interrupt import InterruptedCommandError
from eventlm.replay.debugger.session import Session
from eventlm.replay.expressions.errors import ExpressionError

HOST = "127.0.0.1"
STATIC = resources.files(__package__) / "static"
_MAX_COMMAND_LENGTH = 4096
_MAX_BODY_BYTES = 64 * 1024
#: How often a run that is being written is looked at while a page waits for news, and how long a page waits.
_POLL_SECONDS = 0.5
_NEWS_SECONDS = 25.0
_NO_STORE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class CommandRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /api/command`."""

    command: Annotated[str, Meta(max_length=_MAX_COMMAND_LENGTH)]


class ViewServer:
    """Serves one session. Its work is done by one thread, one command after the other."""

    def __init__(self, session: Session, token: str, *, speed: float = 0.0) -> None:
        self._session = session
        self._speed = speed
        self._thread = ThreadPoolExecutor(1, "eventlm-view")
        self._report: tuple[int, bytes] | None = None
        #: Commands that were sent, and how many of them were sent before the latest cancel.
        self._num_sent = 0
        self._num_cancelled = 0
        self.app = web.Application(middlewares=[_say_errors, guard(token)], client_max_size=_MAX_BODY_BYTES)
        self.app.add_routes(
            [
                web.get("/", self._page),
                web.get("/view.js", _file(lambda: link("view.js", REPORT_STATIC, STATIC), "text/javascript")),
                web.get("/view.css", _file(lambda: link_styles(REPORT_STATIC, STATIC), "text/css")),
                web.get("/api/report", self._send_report),
                web.get("/api/news", self._wait_for_news),
                web.post("/api/command", self._run_command),
                web.post("/api/cancel", self._cancel),
            ]
        )
        self.app.on_cleanup.append(self._end)

    async def _end(self, _: web.Application) -> None:
        self._session.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _page(self, _: web.Request) -> web.Response:
        page = served_page("eventlm view", "/view.js", "/view.css")
        return web.Response(text=page, content_type="text/html", headers=SERVED_HEADERS)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _send_report(self, _: web.Request) -> web.Response:
        response = web.Response(body=await self._in_thread(self._build_report), headers=_NO_STORE)
        response.content_type = "application/json"
        response.enable_compression()
        return response

    def _build_report(self) -> bytes:
        index = self._session.index
        if self._report is None or self._report[0] != index.facts.next_s:
            data = report_data(index, find_all(index), self._session.index.path, None)
            # The debugger's times are those of the run, whatever the page's count from.
            times = {"firstNs": max(index.header.ts, 0), "lastNs": index.facts.last_ns}
            data |= times | {"nextEvent": index.facts.next_s, "isEnded": index.facts.is_ended, "speed": self._speed}
            self._report = (index.facts.next_s, msgspec.json.encode(data))
        return self._report[1]

    async def _wait_for_news(self, request: web.Request) -> web.Response:
        """Answers once the run has events from `after` on, or after a while without any."""
        try:
            after = int(request.query.get("after", "0"))
        except ValueError:
            return refuse(400, "after: it takes the number of an event")
        loop = asyncio.get_running_loop()
        until = loop.time() + _NEWS_SECONDS
        while self._session.index.facts.next_s <= after and loop.time() < until:
            if self._session.index.facts.is_ended:
                break
            await self._in_thread(self._session.read_on)
            if self._session.index.facts.next_s <= after:
                await asyncio.sleep(_POLL_SECONDS)
        facts = self._session.index.facts
        return web.json_response({"nextEvent": facts.next_s, "isEnded": facts.is_ended}, headers=_NO_STORE)

    async def _run_command(self, request: web.Request) -> web.Response:
        try:
            command = msgspec.json.decode(await request.read(), type=CommandRequest).command
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return refuse(400, f"the body is no command: {error}")
        self._num_sent = number = self._num_sent + 1
        reply = await self._in_thread(lambda: self._execute(command, number))
        return web.json_response(reply, headers=_NO_STORE)

    def _execute(self, command: str, number: int) -> dict[str, Any]:
        """The answer with its lines, or what is wrong and in which column."""
        session = self._session
        if number <= self._num_cancelled:
            # It was cancelled while it waited for other work.
            return {"position": session.position, "error": {"message": "cancelled", "isInterrupted": True}}
        reply: dict[str, Any] = {"position": session.position}
        try:
            reply |= {"result": (result := session.execute(command)).to_object(), "lines": list(result.lines())}
            reply |= {"position": session.position, "ts": session.line(session.position).event().ts}
        except ExpressionError as error:
            reply["error"] = {"message": str(error), "column": error.column}
        except InterruptedCommandError as error:
            reply["error"] = {"message": str(error), "isInterrupted": True}
        except EventLMError as error:
            reply["error"] = {"message": str(error)}
        return reply

    async def _cancel(self, _: web.Request) -> web.Response:
        self._num_cancelled = self._num_sent
        self._session.cancel()
        return web.json_response({}, headers=_NO_STORE)


async def serve(server: ViewServer, port: int, announce: Callable[[int], None]) -> None:
    """Serve on this machine until the task is cancelled. port: 0: a free one, which `announce` gets.

    Raises UsageError if the port is taken.
    """
    runner = web.AppRunner(server.app, access_log=None)
    await runner.setup()
    try:
        try:
            site = web.TCPSite(runner, HOST, port, shutdown_timeout=1.0)
            await site.start()
        except OSError as error:
            raise UsageError(f"--port {port}: {error.strerror}; choose another, or none for a free one") from error
        announce(runner.addresses[0][1])
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


@web.middleware
async def _say_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Errors as the page shows them: what aiohttp refuses, and what is wrong with the run."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return refuse(error.status, error.reason)
    except EventLMError as error:
        return refuse(409, str(error))


def _file(content: Callable[[], str], content_type: str) -> Callable[[web.Request], Any]:
    text = ""

    async def send(_: web.Request) -> web.Response:
        nonlocal text
        text = text or content()
        return web.Response(text=text, content_type=content_type, headers=SERVED_HEADERS)

    return send
