"""The application: all endpoints and their handlers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any, Literal

import msgspec
from aiohttp import web
from aiohttp.http import HttpVersion11

from eventlm._version import __version__
from eventlm.errors import UnknownModelError
from eventlm.server.anthropic.errors import MESSAGES_ERRORS, MESSAGES_PATH, set_messages_headers
from eventlm.server.anthropic.messages import MESSAGES, MESSAGES_ENDPOINTS
from eventlm.server.anthropic.models import (
    VERSION,
    ModelInfo,
    ModelPage,
    is_from_anthropic_client,
    model_info,
    model_page,
)
from eventlm.server.api import APIS, Api
from eventlm.server.batches.batches import BATCH_ENDPOINTS
from eventlm.server.batches.files import FILE_ENDPOINTS, UPLOAD_TYPE
from eventlm.server.batches.folder import BATCHES, BatchFolder
from eventlm.server.chat_page.files import CHAT_PAGE_ENDPOINTS
from eventlm.server.context import CONTEXT, ServerContext, json_response
from eventlm.server.cors import answer_preflight, set_cors_headers
from eventlm.server.endpoints.admin import ADMIN_ENDPOINTS
from eventlm.server.endpoints.metrics import MEDIA_TYPES as METRICS_MEDIA_TYPES
from eventlm.server.endpoints.metrics import metrics
from eventlm.server.endpoints.openapi import JSON, Endpoint, Parameter, openapi_document
from eventlm.server.endpoints.request_info import ExplainReply, RequestInfo, explain_request, request_info
from eventlm.server.endpoints.resumption import FROM, LAST_EVENT_ID, EventId, cancel_stream, resume_stream
from eventlm.server.errors import ERROR_FORMS, ErrorForm
from eventlm.server.llamacpp.endpoints import LLAMACPP_APIS, LLAMACPP_ENDPOINTS, LLAMACPP_REFUSED
from eventlm.server.llamacpp.tokenization import TokenizeContentRequest, TokenizedContent
from eventlm.server.middleware import (
    HEALTH_PATH,
    METRICS_PATH,
    PING_PATH,
    SCOPES,
    Handler,
    authenticate,
    generating,
    observe,
    set_headers,
)
from eventlm.server.model_card import model_card
from eventlm.server.ollama.endpoints import OLLAMA_APIS, OLLAMA_ENDPOINTS, OLLAMA_PREFIX, OLLAMA_REFUSED
from eventlm.server.ollama.lines import OLLAMA_ERRORS
from eventlm.server.openai.chat import CHAT, chat_completions
from eventlm.server.openai.completions import COMPLETIONS, completions
from eventlm.server.openai.embeddings import (
    EMBEDDINGS,
    UNSUPPORTED_IN_EMBEDDINGS,
    EmbeddingList,
    EmbeddingRequest,
    embeddings,
)
from eventlm.server.openai.replies import (
    CancelledReply,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Health,
    Model,
    ModelList,
    ModelMeta,
    Version,
)
from eventlm.server.refusals import REFUSED_PATHS, RefusedPath
from eventlm.server.reply_format import SERVER_SENT_EVENTS
from eventlm.server.responses.create import RESPONSES
from eventlm.server.responses.endpoints import RESPONSES_ENDPOINTS
from eventlm.server.scheduling import CLASS_HEADER
from eventlm.server.vllm.chat_batch import UNSUPPORTED_IN_BATCHES, ChatBatchRequest, chat_batch
from eventlm.server.vllm.endpoints import VLLM_ENDPOINTS, VLLM_REFUSED
from eventlm.server.vllm.pooling import POOLED
from eventlm.server.vllm.tokenization import (
    Detokenization,
    DetokenizeRequest,
    Tokenization,
    TokenizeChatRequest,
    TokenizeRequest,
    detokenize,
    tokenize,
)
from eventlm.text.protocol import (
    IGNORED,
    UNSUPPORTED_IN_CHAT,
    UNSUPPORTED_IN_COMPLETIONS,
    ChatCompletionRequest,
    CompletionRequest,
)


def make_app(context: ServerContext) -> web.Application:
    """The HTTP application. `HttpServer` serves it with `handler_cancellation`.

    Raises UsageError for a folder of batches that cannot be used.
    """
    across_origins = bool(context.config.cors_origin)
    app = web.Application(middlewares=[observe, *([answer_preflight] if across_origins else []), authenticate])
    app[CONTEXT] = context
    app[APIS] = APIS_BY_PREFIX
    app[ERROR_FORMS] = ERROR_FORMS_BY_PATH
    app[REFUSED_PATHS] = ALL_REFUSED_PATHS
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


async def _list_models(request: web.Request) -> web.Response:
    """The models that requests may name."""
    context = request.app[CONTEXT]
    if is_from_anthropic_client(request):
        return json_response(model_page(context))
    names = context.engine.model_names
    return json_response(
        ModelList(data=[_model(context, name) for name in names], models=[model_card(context, name) for name in names])
    )


async def _get_model(request: web.Request) -> web.Response:
    """One of the models."""
    context = request.app[CONTEXT]
    name = request.match_info["model"]
    if name not in context.engine.model_names:
        raise UnknownModelError(name)
    return json_response((model_info if is_from_anthropic_client(request) else _model)(context, name))


def _model(context: ServerContext, name: str) -> Model:
    facts, max_model_len = context.facts, context.engine.max_model_len
    meta = ModelMeta(
        n_vocab=context.vocab_size,
        n_ctx_train=facts.context_length,
        n_embd=facts.embedding_size,
        n_params=facts.num_parameters,
        size=facts.num_bytes,
    )
    return Model(id=name, created=context.created, max_model_len=max_model_len, meta=meta)


async def _health(request: web.Request) -> web.Response:
    """Whether requests are accepted, and whether they wait until an operator resumes."""
    context = request.app[CONTEXT]
    context.check_available()
    return json_response(Health("paused" if context.engine.paused else "ready"))


async def _version(request: web.Request) -> web.Response:
    """The version of the server."""
    return json_response(Version(version=__version__))


async def _openapi(request: web.Request) -> web.Response:
    """This description of the server."""
    return web.Response(body=_openapi_json(has_page=request.app[CONTEXT].config.ui), content_type=JSON)


@cache
def _openapi_json(*, has_page: bool) -> bytes:
    return msgspec.json.encode(openapi_document(_endpoints(has_page=has_page), ERROR_FORMS_BY_PATH))


def _endpoints(*, has_page: bool) -> tuple[Endpoint, ...]:
    """All, or all except the chat page."""
    return tuple(endpoint for endpoint in ENDPOINTS if has_page or endpoint not in CHAT_PAGE_ENDPOINTS)


#: All APIs that generate.
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
ALL_REFUSED_PATHS: tuple[RefusedPath, ...] = (*LLAMACPP_REFUSED, *OLLAMA_REFUSED, *VLLM_REFUSED)


def _generating(
    path: str,
    handler: Handler,
    body: Any,
    reply: Any,
    chunk: Any = None,
    *,
    refused: Mapping[str, tuple[Any, ...]],
) -> Endpoint:
    """An endpoint that submits requests."""
    parameter = Parameter(CLASS_HEADER, "header", str, "The service class, where requests may choose it.")
    return Endpoint(
        "POST",
        path,
        handler,
        body,
        reply,
        chunk=chunk,
        generates=True,
        parameters=(parameter,),
        ignored=IGNORED,
        refused=refused,
    )


#: All endpoints. `/openapi.json` is made from this.
ENDPOINTS = (
    _generating(
        "/v1/chat/completions",
        chat_completions,
        ChatCompletionRequest,
        ChatCompletion,
        ChatCompletionChunk,
        refused=UNSUPPORTED_IN_CHAT,
    ),
    _generating(
        "/v1/chat/completions/batch", chat_batch, ChatBatchRequest, ChatCompletion, refused=UNSUPPORTED_IN_BATCHES
    ),
    _generating(
        "/v1/completions", completions, CompletionRequest, Completion, Completion, refused=UNSUPPORTED_IN_COMPLETIONS
    ),
    _generating("/v1/embeddings", embeddings, EmbeddingRequest, EmbeddingList, refused=UNSUPPORTED_IN_EMBEDDINGS),
    *RESPONSES_ENDPOINTS,
    *MESSAGES_ENDPOINTS,
    Endpoint(
        "GET",
        "/v1/stream/{id:.+}",
        resume_stream,
        media_types=(SERVER_SENT_EVENTS,),
        errors=(404, 409, 429, 503),
        parameters=(
            Parameter(LAST_EVENT_ID, "header", EventId, "id of the last event that the client has had"),
            Parameter(FROM, "query", EventId, "the same, for clients that cannot send the header"),
        ),
        can_be_empty=True,
    ),
    Endpoint("DELETE", "/v1/stream/{id:.+}", cancel_stream, reply=CancelledReply, errors=(404, 503)),
    *VLLM_ENDPOINTS,
    *(
        Endpoint("POST", f"{prefix}/{path}", handler, body, reply, errors=(503,))
        for path, handler, body, reply in (
            (
                "tokenize",
                tokenize,
                (TokenizeRequest, TokenizeChatRequest, TokenizeContentRequest),
                (Tokenization, TokenizedContent),
            ),
            ("detokenize", detokenize, DetokenizeRequest, Detokenization),
        )
        for prefix in ("", "/v1")
    ),
    *(
        Endpoint("GET", f"{prefix}/models", _list_models, reply=(ModelList, ModelPage), parameters=(VERSION,))
        for prefix in ("/v1", "")
    ),
    Endpoint("GET", "/v1/models/{model:.+}", _get_model, reply=(Model, ModelInfo), parameters=(VERSION,)),
    Endpoint(
        "GET",
        "/v1/requests/{id:.+}/explain",
        explain_request,
        reply=ExplainReply,
        media_types=(JSON, "text/plain"),
        parameters=(Parameter("format", "query", Literal["json", "text"], "What the explanation comes as."),),
        errors=(409, 429, 503),
    ),
    Endpoint("GET", "/v1/requests/{id:.+}", request_info, reply=RequestInfo, errors=(503,)),
    *(
        Endpoint("GET", prefix + HEALTH_PATH, _health, reply=Health, errors=(503,), scope=None)
        for prefix in ("", "/v1")
    ),
    Endpoint("GET", PING_PATH, _health, reply=Health, errors=(503,), scope=None),
    Endpoint("POST", PING_PATH, _health, reply=Health, errors=(503,), scope=None),
    Endpoint("GET", METRICS_PATH, metrics, media_types=METRICS_MEDIA_TYPES, scope=None),
    Endpoint("GET", "/version", _version, reply=Version, scope=None),
    Endpoint("GET", "/openapi.json", _openapi, reply=dict[str, Any], scope=None),
    *CHAT_PAGE_ENDPOINTS,
    *LLAMACPP_ENDPOINTS,
    *OLLAMA_ENDPOINTS,
    *FILE_ENDPOINTS,
    *BATCH_ENDPOINTS,
    *ADMIN_ENDPOINTS,
)
