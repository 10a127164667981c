"""All endpoints of Ollama's API, and those that are refused by name."""

from __future__ import annotations

from typing import Any

from eventlm.server.api import Api
from eventlm.server.endpoints.openapi import Endpoint
from eventlm.server.ollama.chat import OLLAMA_CHAT, OllamaChatReply, OllamaChatRequest, ollama_chat
from eventlm.server.ollama.embed import (
    IGNORED_IN_EMBED,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    OllamaEmbeddingsReply,
    OllamaEmbeddingsRequest,
    OllamaEmbedReply,
    OllamaEmbedRequest,
    ollama_embed,
    ollama_embeddings,
)
from eventlm.server.ollama.generate import (
    OLLAMA_GENERATE,
    UNSUPPORTED_IN_GENERATE,
    OllamaGenerateReply,
    OllamaGenerateRequest,
    ollama_generate,
)
from eventlm.server.ollama.models import (
    OllamaModels,
    OllamaShowReply,
    OllamaShowRequest,
    OllamaVersion,
    RunningModels,
    ollama_ps,
    ollama_show,
    ollama_tags,
    ollama_version,
)
from eventlm.server.ollama.options import IGNORED_BY_OLLAMA
from eventlm.server.refusals import RefusedPath
from eventlm.server.reply_format import JSON_LINES

#: The beginning of all paths.
OLLAMA_PREFIX = "/api/"
OLLAMA_APIS: tuple[Api[Any], ...] = (OLLAMA_CHAT, OLLAMA_GENERATE, OLLAMA_EMBED, OLLAMA_EMBEDDINGS)
_FIXED = "this server runs the model that it was started with; `eventlm serve MODEL` runs another one"

OLLAMA_ENDPOINTS = (
    *(
        Endpoint(
            "POST",
            OLLAMA_PREFIX + name,
            handler,
            body,
            reply,
            chunk=chunk,
            chunk_type=JSON_LINES,
            generates=True,
            ignored=ignored,
            refused=refused,
        )
        for name, handler, body, reply, chunk, ignored, refused in (
            ("chat", ollama_chat, OllamaChatRequest, OllamaChatReply, OllamaChatReply, IGNORED_BY_OLLAMA, {}),
            (
                "generate",
                ollama_generate,
                OllamaGenerateRequest,
                OllamaGenerateReply,
                OllamaGenerateReply,
                IGNORED_BY_OLLAMA,
                UNSUPPORTED_IN_GENERATE,
            ),
            ("embed", ollama_embed, OllamaEmbedRequest, OllamaEmbedReply, None, IGNORED_IN_EMBED, {}),
            (
                "embeddings",
                ollama_embeddings,
                OllamaEmbeddingsRequest,
                OllamaEmbeddingsReply,
                None,
                IGNORED_IN_EMBED,
                {},
            ),
        )
    ),
    Endpoint("GET", "/api/tags", ollama_tags, reply=OllamaModels),
    Endpoint("POST", "/api/show", ollama_show, OllamaShowRequest, OllamaShowReply),
    Endpoint("GET", "/api/ps", ollama_ps, reply=RunningModels),
    Endpoint("GET", "/api/version", ollama_version, reply=OllamaVersion, scope=None),
)
OLLAMA_REFUSED = (
    RefusedPath("/api/(pull|push|create|copy|delete|blobs/.*)", _FIXED),
    RefusedPath(
        "/api/(me|signout|signin|user/.*|experimental/.*|web_search|web_fetch)",
        "this server has no connection to ollama.com",
    ),
)
