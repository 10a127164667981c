"""`GET /v1/models` for Anthropic's clients, which send their API's version with every request."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from aiohttp import web
from msgspec import Struct

from eventlm.server.context import ServerContext
from eventlm.server.endpoints.openapi import Parameter

VERSION = Parameter("anthropic-version", "header", str, "With it, the reply has Anthropic's form.")


class ModelInfo(Struct, frozen=True, kw_only=True, tag="model"):
    """One model. Both limits are of the context, which prompt and reply share."""

    id: str
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelPage(Struct, frozen=True, kw_only=True):
    """All models, on one page."""

    data: list[ModelInfo]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


def is_from_anthropic_client(request: web.Request) -> bool:
    """Whether a client of Anthropic's asks."""
    return VERSION.name in request.headers


def model_info(context: ServerContext, name: str) -> ModelInfo:
    """A served model."""
    length = context.engine.max_model_len
    return ModelInfo(
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(context.created, UTC),
        max_input_tokens=length,
        max_tokens=length,
    )


def model_page(context: ServerContext) -> ModelPage:
    """All served models."""
    names = context.engine.model_names
    return ModelPage(
        data=[model_info(context.of_model(name), name) for name in names], first_id=names[0], last_id=names[-1]
    )
