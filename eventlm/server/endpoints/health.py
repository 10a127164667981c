"""What monitors ask for: whether the server takes requests, and its version."""

from __future__ import annotations

from typing import Literal

from aiohttp import web
from msgspec import Struct

from eventlm._version import __version__
from eventlm.server.context import CONTEXT, json_response
from eventlm.server.endpoints.openapi import Endpoint
from eventlm.server.errors import unavailable
from eventlm.server.middleware import HEALTH_PATH, PING_PATH


class Health(Struct, frozen=True, omit_defaults=True):
    """Reply of `/health` while requests are accepted; `paused`: they wait. waiting_for_room: replicas that wait until a
    host has room for their workers, if there are any. unavailable: of several models those of which no worker and no
    backend is up.
    """

    status: Literal["ready", "paused"]
    waiting_for_room: int = 0
    unavailable: list[str] = []


class Version(Struct, frozen=True):
    """Reply of `/version`. server_id: of this run of the server, by which a gateway can tell servers apart."""

    version: str
    server_id: str


async def health(request: web.Request) -> web.Response:
    """Whether requests are accepted and there is a worker, and whether they wait until an operator resumes."""
    context = request.app[CONTEXT]
    context.check_available()
    engine = context.engine
    if not engine.has_worker:
        if context.forwards:
            raise unavailable("No backend is up; requests wait for one.")
        if engine.num_waiting_for_room:
            raise unavailable("No host has room for a worker; requests wait for it.")
        raise unavailable("The worker was lost, and another one is being started; requests wait for it.")
    status: Literal["ready", "paused"] = "paused" if engine.paused else "ready"
    return json_response(Health(status, engine.num_waiting_for_room, context.unavailable_models))


async def version(request: web.Request) -> web.Response:
    """The version of the server, and which one it is."""
    return json_response(Version(__version__, request.app[CONTEXT].engine.server_id))


async def running(request: web.Request) -> web.Response:
    """That the server runs, in words."""
    return web.Response(text="eventlm is running")


#: In place of the chat page. Clients of Ollama ask for it before anything else.
RUNNING_ENDPOINT = Endpoint("GET", "/", running, media_types=("text/plain",), scope=None)
HEALTH_ENDPOINTS = (
    Endpoint("GET", HEALTH_PATH, health, reply=Health, errors=(503,), scope=None),
    Endpoint("GET", f"/v1{HEALTH_PATH}", health, reply=Health, errors=(503,), scope=None),
    Endpoint("GET", PING_PATH, health, reply=Health, errors=(503,), scope=None),
    Endpoint("POST", PING_PATH, health, reply=Health, errors=(503,), scope=None),
    Endpoint("GET", "/version", version, reply=Version, scope=None),
)
