"""The endpoints that vLLM has beside OpenAI's, and those of both that this server does not have."""

from __future__ import annotations

from typing import Any

from eventlm.server.endpoints.openapi import Endpoint, Parameter
from eventlm.server.middleware import LOAD_PATH
from eventlm.server.openai.embeddings import EmbeddingRequest
from eventlm.server.refusals import RefusedPath
from eventlm.server.scheduling import CLASS_HEADER
from eventlm.server.vllm.invocations import invocations
from eventlm.server.vllm.pooling import UNSUPPORTED_IN_POOLING, PoolingList, PoolingRequest, pooling
from eventlm.server.vllm.server_info import ConfigFormat, ServerInfo, ServerLoad, load, server_info, tokenizer_info
from eventlm.text.protocol import IGNORED, ChatCompletionRequest, CompletionRequest

_CLASS = Parameter(CLASS_HEADER, "header", str, "The service class, where requests may choose it.")

VLLM_ENDPOINTS = (
    Endpoint(
        "POST",
        "/pooling",
        pooling,
        PoolingRequest,
        PoolingList,
        generates=True,
        parameters=(_CLASS,),
        ignored=IGNORED,
        refused=UNSUPPORTED_IN_POOLING,
    ),
    Endpoint(
        "POST",
        "/invocations",
        invocations,
        (ChatCompletionRequest, CompletionRequest, EmbeddingRequest),
        dict[str, Any],
        chunk=dict[str, Any],
        generates=True,
        parameters=(_CLASS,),
    ),
    Endpoint("GET", "/tokenizer_info", tokenizer_info, reply=dict[str, Any], errors=(404,)),
    Endpoint("GET", LOAD_PATH, load, reply=ServerLoad, errors=(503,), scope=None),
    Endpoint(
        "GET",
        "/server_info",
        server_info,
        reply=ServerInfo,
        parameters=(Parameter("config_format", "query", ConfigFormat, "What the configuration comes as."),),
        scope="admin",
    ),
)

_CHOICE = "/v1/chat/completions with structured_outputs.choice"
_COMPARE = "/v1/embeddings and compare the vectors"
_TEXT = "/v1/chat/completions with text"
_MERGED = "a checkpoint that has it: `eventlm serve --model`"

VLLM_REFUSED = tuple(
    RefusedPath(path, f"this server generates text and embeds it, and has no {what}; use {instead}")
    for path, what, instead in (
        ("/(v1/)?classify", "classifier", _CHOICE),
        ("/(v1/)?score", "scores of pairs", _COMPARE),
        ("/v2/rerank", "ranking of documents", _COMPARE),
        ("/v1/(un)?load_lora_adapter", "adapters", _MERGED),
        ("/v1/assistants(/.*)?", "assistants", "/v1/responses"),
        ("/v1/audio/.*", "speech", _TEXT),
        ("/v1/fine_tuning/.*", "training", _MERGED),
        ("/v1/images/.*", "pictures", _TEXT),
        ("/v1/moderations", "moderation", _CHOICE),
        ("/v1/realtime(/.*)?", "realtime sessions", '/v1/chat/completions with "stream": true'),
        ("/v1/threads(/.*)?", "threads", "/v1/responses with previous_response_id"),
        ("/v1/uploads(/.*)?", "uploads", _TEXT),
        ("/v1/vector_stores(/.*)?", "vector stores", "/v1/embeddings and a store of your own"),
        ("/v1/videos(/.*)?", "videos", _TEXT),
    )
)
