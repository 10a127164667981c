"""The endpoints of OpenAI's API, without the Responses API and batches."""

from __future__ import annotations

from eventlm.server.anthropic.models import VERSION, ModelInfo, ModelPage
from eventlm.server.endpoints.openapi import Endpoint
from eventlm.server.openai.chat import chat_completions
from eventlm.server.openai.completions import completions
from eventlm.server.openai.embeddings import UNSUPPORTED_IN_EMBEDDINGS, EmbeddingList, EmbeddingRequest, embeddings
from eventlm.server.openai.models import get_model, list_models
from eventlm.server.openai.replies import ChatCompletion, ChatCompletionChunk, Completion, Model, ModelList
from eventlm.text.protocol import (
    IGNORED,
    UNSUPPORTED_IN_CHAT,
    UNSUPPORTED_IN_COMPLETIONS,
    ChatCompletionRequest,
    CompletionRequest,
)

OPENAI_ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        ChatCompletionRequest,
        ChatCompletion,
        chunk=ChatCompletionChunk,
        generates=True,
        ignored=IGNORED,
        refused=UNSUPPORTED_IN_CHAT,
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        completions,
        CompletionRequest,
        Completion,
        chunk=Completion,
        generates=True,
        ignored=IGNORED,
        refused=UNSUPPORTED_IN_COMPLETIONS,
    ),
    Endpoint(
        "POST",
        "/v1/embeddings",
        embeddings,
        EmbeddingRequest,
        EmbeddingList,
        generates=True,
        ignored=IGNORED,
        refused=UNSUPPORTED_IN_EMBEDDINGS,
    ),
    *(
        Endpoint("GET", f"{prefix}/models", list_models, reply=(ModelList, ModelPage), parameters=(VERSION,))
        for prefix in ("/v1", "")
    ),
    Endpoint("GET", "/v1/models/{model:.+}", get_model, reply=(Model, ModelInfo), parameters=(VERSION,)),
)
