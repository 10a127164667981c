"""The endpoints of the Responses API."""

from __future__ import annotations

from eventlm.server.endpoints.openapi import Endpoint
from eventlm.server.refusals import RefusedPath
from eventlm.server.responses.conversations import CONVERSATION_ENDPOINTS
from eventlm.server.responses.create import count_input_tokens, create_response
from eventlm.server.responses.events import ResponseEvent
from eventlm.server.responses.protocol import IGNORED, UNSUPPORTED_IN_RESPONSES, InputTokensRequest, ResponsesRequest
from eventlm.server.responses.replies import InputTokens, Response
from eventlm.server.responses.retrieval import RETRIEVAL_ENDPOINTS

#: What the prompt of a response depends on.
_USED_BY_PROMPTS = (
    "model", "input", "instructions", "previous_response_id", "conversation", "tools", "tool_choice", "reasoning",
    "truncation", "max_output_tokens", "chat_template_kwargs",
)  # fmt: skip

RESPONSES_REFUSED = (
    RefusedPath(
        "/v1/responses/compact",
        "nothing here encrypts a compacted conversation; shorten it at the client, or set 'truncation' to \"auto\"",
    ),
)
RESPONSES_ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/responses",
        create_response,
        ResponsesRequest,
        Response,
        chunk=ResponseEvent,
        generates=True,
        ignored=IGNORED,
        refused=UNSUPPORTED_IN_RESPONSES,
    ),
    Endpoint(
        "POST",
        "/v1/responses/input_tokens",
        count_input_tokens,
        InputTokensRequest,
        InputTokens,
        errors=(503,),
        only=_USED_BY_PROMPTS,
        refused=UNSUPPORTED_IN_RESPONSES,
    ),
    *RETRIEVAL_ENDPOINTS,
    *CONVERSATION_ENDPOINTS,
)
