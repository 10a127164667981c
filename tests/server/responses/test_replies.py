"""What replies have, against the types of OpenAI's own client."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from openai import BaseModel
from openai.types import responses

from eventlm.server.responses import replies

#: Fields of features that this server does not have.
ABSENT = {
    responses.Response: {
        "access_programs", "image", "input_transformations", "moderation", "prompt_cache_diagnostics",
        "prompt_cache_options", "prompt_cache_retention", "tool_usage",
    },
    responses.ResponseOutputMessage: {"phase"},
    responses.ResponseFunctionToolCall: {"async_", "caller", "namespace"},
    responses.response_usage.InputTokensDetails: {"cache_write_tokens_details"},
    responses.ResponseError: {"misalignment", "param", "type"},
}  # fmt: skip
#: Fields that only this server has, and one that OpenAI sends too.
OWN = {responses.Response: {"eventlm", "store"}}


def names_of(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields)


@pytest.mark.parametrize(
    ("struct", "model"),
    [
        (replies.Response, responses.Response),
        (replies.OutputMessage, responses.ResponseOutputMessage),
        (replies.OutputText, responses.ResponseOutputText),
        (replies.FunctionCallItem, responses.ResponseFunctionToolCall),
        (replies.ReasoningItem, responses.ResponseReasoningItem),
        (replies.ReasoningText, responses.response_reasoning_item.Content),
        (replies.ResponseUsage, responses.ResponseUsage),
        (replies.InputTokensDetails, responses.response_usage.InputTokensDetails),
        (replies.OutputTokensDetails, responses.response_usage.OutputTokensDetails),
        (replies.ResponseError, responses.ResponseError),
        (replies.IncompleteDetails, responses.response.IncompleteDetails),
        (replies.InputTokens, responses.input_token_count_response.InputTokenCountResponse),
    ],
)
def test_a_reply_has_the_documented_fields(struct: Any, model: Any) -> None:
    tag = {"type"} if struct.__struct_config__.tag else set()
    found = {field.encode_name for field in structs.fields(struct)} | tag
    known = names_of(model)
    assert ABSENT.get(model, set()) <= known | {"namespace", "async_", "caller", "phase"}
    assert found - OWN.get(model, set()) == known - ABSENT.get(model, set())
