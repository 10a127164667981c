"""The application: which path is answered by what."""

from __future__ import annotations

from aiohttp import web
from aiohttp.http import HttpVersion11

from eventlm._version import __version__
from eventlm.server.chat import chat_completions
from eventlm.server.completions import completions
from eventlm.server.context import CONTEXT, ServerContext, json_response
from eventlm.server.errors import model_not_found
from eventlm.server.metrics import metrics
from eventlm.server.middleware import HEALTH_PATH, METRICS_PATH, authenticate, generating, observe, set_request_id
from eventlm.server.replies import Model, ModelList


def make_app(context: ServerContext) -> web.Application:
    """The HTTP application over an engine. It is served with `handler_cancellation`: see `HttpServer`."""
    app = web.Application(middlewares=[observe, authenticate])
    app[CONTEXT] = context
    app.on_response_prepare.append(set_request_id)
    router = app.router
    router.add_post("/v1/chat/completions", generating(chat_completions), expect_handler=_expect)
    router.add_post("/v1/completions", generating(completions), expect_handler=_expect)
    router.add_get("/v1/models", _list_models, expect_handler=_expect)
    router.add_get("/v1/models/{model:.+}", _get_model, expect_handler=_expect)
    router.add_get(HEALTH_PATH, _health, expect_handler=_expect)
    router.add_get(METRICS_PATH, metrics, expect_handler=_expect)
    router.add_get("/version", _version, expect_handler=_expect)
    return app


async def _expect(request: web.Request) -> None:
    """Let a client go on that waits for permission to send its body, unless the body will be refused anyway."""
    limit = request.app[CONTEXT].config.max_body_bytes
    too_large = request.content_length is not None and request.content_length > limit
    wants_permission = request.headers.get("Expect", "").lower() == "100-continue"
    if wants_permission and request.version == HttpVersion11 and not too_large:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # Those bytes are no part of the reply.
        request.writer.output_size = 0


async def _list_models(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    return json_response(ModelList(data=[_model(context, name) for name in context.engine.model_names]))


async def _get_model(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    name = request.match_info["model"]
    if name not in context.engine.model_names:
        raise model_not_found(name)
    return json_response(_model(context, name))


def _model(context: ServerContext, name: str) -> Model:
    return Model(id=name, created=context.created, max_model_len=context.engine.max_model_len)


async def _health(request: web.Request) -> web.Response:
    request.app[CONTEXT].check_available()
    return json_response({"status": "ready"})


async def _version(request: web.Request) -> web.Response:
    return json_response({"version": __version__})
