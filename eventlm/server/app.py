"""The application: all endpoints and their handlers."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http import HttpVersion11

from eventlm.server.anthropic.errors import MESSAGES_ERRORS, MESSAGES_PATH, set_messages_headers
from eventlm.server.anthropic.messages import MESSAGES, MESSAGES_ENDPOINTS, MESSAGES_REFUSED
from eventlm.server.api import APIS, Api
from eventlm.server.batches.batches import BATCH_ENDPOINTS
from eventlm.server.batches.files import FILE_ENDPOINTS, UPLOAD_TYPE
from eventlm.server.batches.folder import BATCHES, BatchFolder
from eventlm.server.chat_page.files import CHAT_PAGE_ENDPOINTS
from eventlm.server.context import CONTEXT, ServerContext
from eventlm.server.cors import answer_preflight, refuse_foreign_pages, set_cors_headers
from eventlm.server.dashboard.endpoints import FEED, LOOK_ENDPOINTS
from eventlm.server.dashboard.feed import FrameFeed
from eventlm.server.dashboard.page import DASHBOARD_ENDPOINTS
from eventlm.server.endpoints.admin import ADMIN_ENDPOINTS
from eventlm.server.endpoints.backends import BACKEND_ENDPOINTS
from eventlm.server.endpoints.health import HEALTH_ENDPOINTS, RUNNING_ENDPOINT
from eventlm.server.endpoints.metrics import MEDIA_TYPES as METRICS_MEDIA_TYPES
from eventlm.server.endpoints.metrics import metrics
from eventlm.server.endpoints.openapi import JSON, Endpoint, openapi_document
from eventlm.server.endpoints.request_info import REQUEST_ENDPOINTS
from eventlm.server.endpoints.resumption import RESUMPTION_ENDPOINTS
from eventlm.server.errors import ERROR_FORMS, ErrorForm
from eventlm.server.llamacpp.endpoints import LLAMACPP_APIS, LLAMACPP_ENDPOINTS, LLAMACPP_REFUSED
from eventlm.server.middleware import METRICS_PATH, SCOPES, authenticate, generating, observe, set_headers
from eventlm.server.ollama.endpoints import OLLAMA_APIS, OLLAMA_ENDPOINTS, OLLAMA_PREFIX, OLLAMA_REFUSED
from eventlm.server.ollama.lines import OLLAMA_ERRORS
from eventlm.server.openai.chat import CHAT
from eventlm.server.openai.completions import COMPLETIONS
from eventlm.server.openai.embeddings import EMBEDDINGS
from eventlm.server.openai.endpoints import OPENAI_ENDPOINTS
from eventlm.server.refusals import REFUSED_PATHS, RefusedPath
from eventlm.server.responses.create import RESPONSES
from eventlm.server.responses.endpoints import RESPONSES_ENDPOINTS, RESPONSES_REFUSED
from eventlm.server.vllm.endpoints import VLLM_ENDPOINTS, VLLM_REFUSED
from eventlm.server.vllm.pooling import POOLED


def make_app(context: ServerContext) -> web.Application:
    """The HTTP application. `HttpServer` serves it with `handler_cancellation`.

    Raises UsageError for a folder of batches that cannot be used.
    """
    across_origins = bool(context.config.cors_origin)
    app = web.Application(
        middlewares=[observe, *([answer_preflight] if across_origins else []), refuse_foreign_pages, authenticate]
    )
    app[CONTEXT] = context
    app[APIS] = APIS_BY_PREFIX
    app[ERROR_FORMS] = ERROR_FORMS_BY_PATH
    app[REFUSED_PATHS] = ALL_REFUSED_PATHS
    feed = app[FEED] = FrameFeed(context.engine)

    async def end_feed(app: web.Application) -> None:
        feed.close()

    app.on_shutdown.append(end_feed)
    if context.config.batch_dir:
        app[BATCHES] = BatchFolder(context.system, context.config)
    app.on_response_prepare.append(set_headers)
    app.on_response_prepare.append(set_messages_headers)
    if across_origins:
        app.on_response_prepare.append(set_cors_headers)
    scopes = app[SCOPES] = {}
    for endpoint in _endpoints(has_page=context.config.ui):
        handler = generating(endpoint.handler) if endpoint.generates else endpoint.handler
        scopes[handler] = endpoint.scope
        # A GET answers a HEAD too.
        add = app.router.add_get if endpoint.method == "GET" else partial(app.router.add_route, endpoint.method)
        add(endpoint.path, handler, expect_handler=_expect)
    return app


async def _expect(request: web.Request) -> None:
    """Let a waiting client send its body, unless the body is too large."""
    config = request.app[CONTEXT].config
    limit = config.max_file_bytes if request.content_type == UPLOAD_TYPE else config.max_body_bytes
    too_large = request.content_length is not None and request.content_length > limit
    wants_permission = request.headers.get("Expect", "").lower() == "100-continue"
    if wants_permission and request.version == HttpVersion11 and not too_large:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # These bytes are not part of the reply.
        request.writer.output_size = 0


async def _openapi(request: web.Request) -> web.Response:
    """This description of the server."""
    return web.Response(body=_openapi_json(has_page=request.app[CONTEXT].config.ui), content_type=JSON)


@cache
def _openapi_json(*, has_page: bool) -> bytes:
    return msgspec.json.encode(openapi_document(_endpoints(has_page=has_page), ERROR_FORMS_BY_PATH))


def _endpoints(*, has_page: bool) -> tuple[Endpoint, ...]:
    """All, or all except the pages, with another answer in the place of the first."""
    if has_page:
        return ENDPOINTS
    return (*(endpoint for endpoint in ENDPOINTS if endpoint not in PAGE_ENDPOINTS), RUNNING_ENDPOINT)


#: All APIs whose replies can be resumed or made by lines of batches. vLLM's batch of chats is not among them: its
#: replies are never streams, and have ids of chats, as in vLLM.
ALL_APIS: tuple[Api[Any], ...] = (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    RESPONSES,
    MESSAGES,
    *LLAMACPP_APIS,
    *OLLAMA_APIS,
    POOLED,
)
APIS_BY_PREFIX = {api.prefix: api for api in ALL_APIS}
#: The forms of errors other than OpenAI's, by the beginning of the paths that have them.
ERROR_FORMS_BY_PATH: dict[str, ErrorForm] = {MESSAGES_PATH: MESSAGES_ERRORS, OLLAMA_PREFIX: OLLAMA_ERRORS}

#: Paths that are refused by name.
ALL_REFUSED_PATHS: tuple[RefusedPath, ...] = (
    *MESSAGES_REFUSED,
    *LLAMACPP_REFUSED,
    *OLLAMA_REFUSED,
    *RESPONSES_REFUSED,
    *VLLM_REFUSED,
)


#: Pages for browsers, which need no key.
PAGE_ENDPOINTS = (*CHAT_PAGE_ENDPOINTS, *DASHBOARD_ENDPOINTS)

#: All endpoints. `/openapi.json` is made from this.
ENDPOINTS = (
    *OPENAI_ENDPOINTS,
    *RESPONSES_ENDPOINTS,
    *FILE_ENDPOINTS,
    *BATCH_ENDPOINTS,
    *MESSAGES_ENDPOINTS,
    *VLLM_ENDPOINTS,
    *LLAMACPP_ENDPOINTS,
    *OLLAMA_ENDPOINTS,
    *RESUMPTION_ENDPOINTS,
    *REQUEST_ENDPOINTS,
    *HEALTH_ENDPOINTS,
    Endpoint("GET", METRICS_PATH, metrics, media_types=METRICS_MEDIA_TYPES, scope=None),
    Endpoint("GET", "/openapi.json", _openapi, reply=dict[str, Any], scope=None),
    *PAGE_ENDPOINTS,
    *ADMIN_ENDPOINTS,
    *BACKEND_ENDPOINTS,
    *LOOK_ENDPOINTS,
)
