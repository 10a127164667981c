"""`POST /pooling`: what /v1/embeddings gives, in vLLM's shape for pooled outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from eventlm.engine.request import Request
from eventlm.server.answer import answer
from eventlm.server.context import ServerContext
from eventlm.server.openai.embeddings import (
    UNSUPPORTED_IN_EMBEDDINGS,
    EmbeddingReplies,
    EmbeddingRequest,
    Embeddings,
    EmbeddingUsage,
)
from eventlm.server.reply_format import ReplyFormat, ReplyIdentity
from eventlm.server.timings import EventlmReply
from eventlm.text.choice_output import ChoiceOutput
from eventlm.text.decoding import decode_request
from eventlm.text.echo import Echo
from eventlm.text.generation import Generation

UNSUPPORTED_IN_POOLING: dict[str, tuple[Any, ...]] = {
    **UNSUPPORTED_IN_EMBEDDINGS,
    "use_activation": (True,),
    "data": (),
}


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """Body of `POST /pooling`: as of /v1/embeddings."""

    task: Literal["embed"] | None = None


class PooledVector(Struct, frozen=True, kw_only=True):
    """The vector of one input."""

    index: int
    object: str = "pooling"
    data: list[float] | str


class PoolingList(Struct, frozen=True, kw_only=True):
    """Reply of `/pooling`, in the order of the inputs."""

    id: str
    object: str = "list"
    created: int
    model: str
    service_tier: str | UnsetType = UNSET
    eventlm: EventlmReply | UnsetType = UNSET
    data: list[PooledVector]
    usage: EmbeddingUsage


class PoolingReplies(EmbeddingReplies):
    """The same vectors in vLLM's shape."""

    async def whole(self, choices: Sequence[ChoiceOutput], generation: Generation) -> PoolingList:
        return PoolingList(
            id=self.identity.reply_id,
            created=self.identity.created,
            model=self._body.model,
            service_tier=self._body.used_tier,
            data=[PooledVector(index=index, data=vector) for index, vector in enumerate(self.vectors(choices))],
            usage=self.usage(generation),
        )


class Pooled(Embeddings):
    """Vectors of texts for vLLM's clients."""

    prefix = "pool-"
    # Lines of batches ask for embeddings.
    path = ""

    def decode(self, data: bytes) -> PoolingRequest:
        return decode_request(data, PoolingRequest, UNSUPPORTED_IN_POOLING)

    def reply_format(
        self,
        context: ServerContext,
        body: EmbeddingRequest,
        group: Sequence[Request],
        identity: ReplyIdentity,
        echoes: Sequence[Echo],
    ) -> ReplyFormat:
        return PoolingReplies(body, context.tokenizer, identity)


POOLED = Pooled()


async def pooling(request: web.Request) -> web.StreamResponse:
    """The vectors of one or more inputs, as /v1/embeddings makes them."""
    return await answer(request, POOLED)
