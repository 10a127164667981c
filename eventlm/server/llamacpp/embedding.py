"""`POST /embedding` and `POST /embeddings`: vectors in llama.cpp's own shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from aiohttp import web
from msgspec import Struct

from eventlm.engine.request import Request
from eventlm.errors import InputError, MissingParameterError
from eventlm.sampling_params import TokenId
from eventlm.server.answer import answer
from eventlm.server.api import Api, Caller, Prepared
from eventlm.server.context import ServerContext
from eventlm.server.llamacpp.request import PromptObject, encode_prompts
from eventlm.server.openai.embeddings import EMBEDDINGS, EmbeddingReplies, EmbeddingRequest
from eventlm.server.reply_format import ReplyFormat, ReplyIdentity
from eventlm.server.translation import native_fields
from eventlm.text.choice_output import ChoiceOutput
from eventlm.text.decoding import decode_request
from eventlm.text.echo import Echo
from eventlm.text.generation import Generation
from eventlm.text.protocol import RequestFields

#: Fields without support, each with the values that ask for nothing.
UNSUPPORTED_IN_EMBEDDING: dict[str, tuple[Any, ...]] = {"encoding_format": ("float",)}
_Part = str | TokenId
_Content = str | PromptObject | list[_Part | list[_Part] | PromptObject] | None


class LlamaEmbeddingRequest(RequestFields, kw_only=True):
    """Body of `POST /embedding`. content, input: two names of the texts, in the forms of a prompt of `/completion`.

    embd_normalize: 2 for vectors of length 1, which is the default, -1 for vectors as the model made them.
    """

    content: _Content = None
    input: _Content = None
    embd_normalize: Literal[-1, 2] | None = None

    @property
    def wants_timings(self) -> bool:
        """False: the reply is a list, which has no room for them."""
        return False


class LlamaEmbedding(Struct, frozen=True):
    """The vectors of a text: one, since its tokens are pooled."""

    index: int
    embedding: list[list[float]]


class LlamaEmbeddingReplies(ReplyFormat):
    """Vectors in the order of the texts."""

    def __init__(self, context: ServerContext, body: LlamaEmbeddingRequest, identity: ReplyIdentity) -> None:
        super().__init__(context.tokenizer, identity)
        self.prompt_param = _param(body)
        self._replies = EmbeddingReplies(_translated(body), context.tokenizer, identity)

    async def whole(self, choices: Sequence[ChoiceOutput], generation: Generation) -> list[LlamaEmbedding]:
        found: list[Any] = [each.embedding for each in (await self._replies.whole(choices, generation)).data]
        return [LlamaEmbedding(index, [vector]) for index, vector in enumerate(found)]


class LlamaEmbeddings(Api[LlamaEmbeddingRequest]):
    """Vectors of texts in llama.cpp's shapes."""

    prefix = "llama_embd-"

    def decode(self, data: bytes) -> LlamaEmbeddingRequest:
        body = decode_request(data, LlamaEmbeddingRequest, UNSUPPORTED_IN_EMBEDDING)
        if body.content is None and body.input is None:
            raise MissingParameterError("content")
        if body.content is not None and body.input is not None:
            raise InputError("input", "'input' and 'content' exclude each other.")
        return body

    async def make_requests(
        self,
        context: ServerContext,
        body: LlamaEmbeddingRequest,
        caller: Caller,
        received_ns: int,
        scheduling: Mapping[str, Any],
    ) -> Prepared:
        param = _param(body)
        translated = _translated(body)
        translated.input = [*await encode_prompts(context, getattr(body, param), param)]
        with native_fields({"input": param}):
            return await EMBEDDINGS.make_requests(context, translated, caller, received_ns, scheduling)

    def reply_format(
        self,
        context: ServerContext,
        body: LlamaEmbeddingRequest,
        group: Sequence[Request],
        identity: ReplyIdentity,
        echoes: Sequence[Echo],
    ) -> ReplyFormat:
        return LlamaEmbeddingReplies(context, body, identity)


def _param(body: LlamaEmbeddingRequest) -> str:
    return "input" if body.content is None else "content"


def _translated(body: LlamaEmbeddingRequest) -> EmbeddingRequest:
    return EmbeddingRequest(model=body.model, input=[], normalize=body.embd_normalize != -1)


LLAMA_EMBEDDINGS = LlamaEmbeddings()


async def llama_embedding(request: web.Request) -> web.StreamResponse:
    """The vectors of one or more texts, in llama.cpp's shapes."""
    return await answer(request, LLAMA_EMBEDDINGS)
