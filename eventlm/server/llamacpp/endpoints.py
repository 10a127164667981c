"""All endpoints of llama.cpp's server that OpenAI's API does not have, and those that are refused by name."""

from __future__ import annotations

from typing import Any

from eventlm.server.api import Api
from eventlm.server.endpoints.openapi import Endpoint, Parameter
from eventlm.server.llamacpp.completion import LLAMA_COMPLETIONS, LlamaCompletion, llama_completion
from eventlm.server.llamacpp.embedding import (
    LLAMA_EMBEDDINGS,
    UNSUPPORTED_IN_EMBEDDING,
    LlamaEmbedding,
    LlamaEmbeddingRequest,
    llama_embedding,
)
from eventlm.server.llamacpp.props import (
    FAIL_ON_NO_SLOT,
    LoraAdapter,
    Props,
    Slot,
    llama_props,
    llama_slots,
    lora_adapters,
)
from eventlm.server.llamacpp.request import IGNORED_BY_LLAMACPP, UNSUPPORTED, LlamaCompletionRequest
from eventlm.server.llamacpp.tokenization import AppliedTemplate, apply_template
from eventlm.server.openai.chat import chat_completions
from eventlm.server.openai.replies import ChatCompletion, ChatCompletionChunk
from eventlm.server.refusals import RefusedPath
from eventlm.text.protocol import IGNORED, UNSUPPORTED_IN_CHAT, USED_BY_TEMPLATES, ChatCompletionRequest

LLAMACPP_APIS: tuple[Api[Any], ...] = (LLAMA_COMPLETIONS, LLAMA_EMBEDDINGS)
#: Of several prompts a list; with `response_fields` some of the fields.
_COMPLETED = (LlamaCompletion, list[LlamaCompletion], dict[str, Any], list[dict[str, Any]])

LLAMACPP_ENDPOINTS = (
    *(
        Endpoint(
            "POST",
            path,
            handler,
            body,
            reply,
            chunk=chunk,
            generates=True,
            ignored=ignored,
            refused=refused,
        )
        for path, handler, body, reply, chunk, ignored, refused in (
            *(
                (
                    path,
                    llama_completion,
                    LlamaCompletionRequest,
                    _COMPLETED,
                    LlamaCompletion,
                    IGNORED_BY_LLAMACPP,
                    UNSUPPORTED,
                )
                for path in ("/completion", "/completions")
            ),
            *(
                (path, llama_embedding, LlamaEmbeddingRequest, list[LlamaEmbedding], None, {}, UNSUPPORTED_IN_EMBEDDING)
                for path in ("/embedding", "/embeddings")
            ),
            (
                "/chat/completions",
                chat_completions,
                ChatCompletionRequest,
                ChatCompletion,
                ChatCompletionChunk,
                IGNORED,
                UNSUPPORTED_IN_CHAT,
            ),
        )
    ),
    Endpoint(
        "POST",
        "/apply-template",
        apply_template,
        ChatCompletionRequest,
        AppliedTemplate,
        errors=(503,),
        only=("model", "messages", *USED_BY_TEMPLATES),
        refused=UNSUPPORTED_IN_CHAT,
    ),
    Endpoint("GET", "/props", llama_props, reply=Props),
    Endpoint(
        "GET",
        "/slots",
        llama_slots,
        reply=list[Slot],
        errors=(503,),
        parameters=(Parameter(FAIL_ON_NO_SLOT, "query", str, "If given, a 503 while no more sequences can run."),),
    ),
    Endpoint("GET", "/lora-adapters", lora_adapters, reply=list[LoraAdapter]),
)
LLAMACPP_REFUSED = (
    RefusedPath("/infill", "there is no infilling here; send the prompt to /completion with the model's own tokens"),
    RefusedPath("/props", "properties are set at the start; see `eventlm serve --help`"),
    RefusedPath("/slots/.*", "caches of prompts are kept by themselves and are not saved to files"),
    RefusedPath("/lora-adapters", "there are no LoRA adapters here; merge them into the model's weights"),
    RefusedPath("/(v1/)?rerank(ing)?", "this server generates text and embeds it; it does not rank documents"),
    RefusedPath(
        "/models/(load|unload)",
        "this server runs the model that it was started with; `eventlm serve MODEL` runs another",
    ),
)
