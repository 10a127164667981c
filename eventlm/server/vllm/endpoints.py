"""The endpoints that vLLM has beside OpenAI's, and those of both that this server does not have."""

from __future__ import annotations

from typing import Any

from eventlm.server.endpoints.openapi import Endpoint, Parameter
from eventlm.server.llamacpp.tokenization import TokenizeContentRequest, TokenizedContent
from eventlm.server.middleware import LOAD_PATH
from eventlm.server.openai.embeddings import EmbeddingRequest
from eventlm.server.openai.replies import ChatCompletion
from eventlm.server.refusals import RefusedPath
from eventlm.server.vllm.chat_batch import UNSUPPORTED_IN_BATCHES, ChatBatchRequest, chat_batch
from eventlm.server.vllm.invocations import invocations
from eventlm.server.vllm.pooling import UNSUPPORTED_IN_POOLING, PoolingList, PoolingRequest, pooling
from eventlm.server.vllm.server_info import ConfigFormat, ServerInfo, ServerLoad, load, server_info, tokenizer_info
from eventlm.server.vllm.tokenization import (
    Detokenization,
    DetokenizeRequest,
    Tokenization,
    TokenizeChatRequest,
    TokenizeRequest,
    detokenize,
    tokenize,
)
from eventlm.text.protocol import IGNORED, UNSUPPORTED, USED_BY_TEMPLATES, ChatCompletionRequest, CompletionRequest

#: What the tokens of a text or of a conversation depend on.
_USED_BY_TOKENIZE = (
    "model", "prompt", "messages", "content", "add_special_tokens", "add_special", "parse_special", "with_pieces",
    "return_token_strs", *USED_BY_TEMPLATES, "truncate_prompt_tokens", "truncation_side",
)  # fmt: skip

VLLM_ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/chat/completions/batch",
        chat_batch,
        ChatBatchRequest,
        ChatCompletion,
        generates=True,
        ignored=IGNORED,
        refused=UNSUPPORTED_IN_BATCHES,
    ),
    Endpoint(
        "POST",
        "/pooling",
        pooling,
        PoolingRequest,
        PoolingList,
        generates=True,
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
        ignored=IGNORED,
        refused=UNSUPPORTED,
    ),
    *(
        Endpoint("POST", f"{prefix}/{path}", handler, body, reply, errors=(503,), only=only)
        for path, handler, body, reply, only in (
            (
                "tokenize",
                tokenize,
                (TokenizeRequest, TokenizeChatRequest, TokenizeContentRequest),
                (Tokenization, TokenizedContent),
                _USED_BY_TOKENIZE,
            ),
            ("detokenize", detokenize, DetokenizeRequest, Detokenization, ()),
        )
        for prefix in ("", "/v1")
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
_MERGED = "a checkpoint with the result: `eventlm serve FOLDER`"

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
        ("/v1/uploads(/.*)?", "uploads in parts", "/v1/files"),
        ("/v1/vector_stores(/.*)?", "vector stores", "/v1/embeddings and a store of your own"),
        ("/v1/videos(/.*)?", "videos", _TEXT),
    )
)
