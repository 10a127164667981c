"""`POST /api/embed`, and its older form `POST /api/embeddings`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from eventlm.engine.request import Request
from eventlm.server.answer import answer
from eventlm.server.api import Api, Caller, Prepared
from eventlm.server.context import ServerContext
from eventlm.server.ollama.options import served_name
from eventlm.server.openai.embeddings import EMBEDDINGS, EmbeddingReplies, EmbeddingRequest
from eventlm.server.reply_format import ReplyFormat, ReplyIdentity
from eventlm.server.timings import EventlmReply
from eventlm.server.translation import native_fields
from eventlm.text.choice_output import ChoiceOutput
from eventlm.text.decoding import decode_request
from eventlm.text.echo import Echo
from eventlm.text.generation import Generation
from eventlm.text.protocol import RequestFields

#: Fields that change nothing, each with the reason.
IGNORED_IN_EMBED = {"keep_alive": "the model stays loaded", "options": "they are about generated text"}


class OllamaEmbedRequest(RequestFields, kw_only=True):
    """Body of `POST /api/embed`.

    truncate: false makes an input that does not fit the context an error; else its end is cut off. dimensions: keep
    only so many of the first numbers.
    """

    model: str
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=0)] | None = None

    @property
    def texts(self) -> list[str]:
        """The inputs."""
        return [self.input] if isinstance(self.input, str) and self.input else list(self.input or [])


class OllamaEmbedReply(Struct, frozen=True, kw_only=True):
    """Reply of `/api/embed`: a vector of length 1 for each input. Durations are in ns."""

    model: str
    embeddings: list[list[float]]
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    eventlm: EventlmReply | UnsetType = UNSET


class OllamaEmbeddingsRequest(RequestFields, kw_only=True):
    """Body of `POST /api/embeddings`."""

    model: str
    prompt: str | None = None


class OllamaEmbeddingsReply(Struct, frozen=True, kw_only=True):
    """Reply of `/api/embeddings`: one vector, as the model made it."""

    embedding: list[float]
    eventlm: EventlmReply | UnsetType = UNSET


class _Vectors(ReplyFormat):
    """Vectors of a translated body."""

    def __init__(self, context: ServerContext, body: EmbeddingRequest, identity: ReplyIdentity, param: str) -> None:
        super().__init__(context.tokenizer, identity)
        self.prompt_param = param
        self._replies = EmbeddingReplies(body, context.tokenizer, identity)

    async def vectors(self, choices: Sequence[ChoiceOutput], generation: Generation) -> list[Any]:
        """As lists of numbers."""
        return [each.embedding for each in (await self._replies.whole(choices, generation)).data]


class OllamaEmbedReplies(_Vectors):
    """Replies of `/api/embed`. model: its name in the body."""

    def __init__(self, context: ServerContext, body: EmbeddingRequest, identity: ReplyIdentity, model: str) -> None:
        super().__init__(context, body, identity, "input")
        self._model = model

    async def whole(self, choices: Sequence[ChoiceOutput], generation: Generation) -> OllamaEmbedReply:
        durations = [row.request_e2e_time for row in generation.rows.values()]
        return OllamaEmbedReply(
            model=self._model,
            embeddings=await self.vectors(choices, generation),
            total_duration=max(durations, default=UNSET),
            load_duration=0 if durations else UNSET,
            prompt_eval_count=generation.token_counts().prompt,
        )


class OllamaEmbeddingsReplies(_Vectors):
    """Replies of `/api/embeddings`."""

    async def whole(self, choices: Sequence[ChoiceOutput], generation: Generation) -> OllamaEmbeddingsReply:
        [vector] = await self.vectors(choices, generation)
        return OllamaEmbeddingsReply(embedding=vector)


class OllamaEmbed(Api[OllamaEmbedRequest]):
    """Vectors of texts, in Ollama's shapes."""

    prefix = "ollama-embed-"
    takes_any_type = True

    def decode(self, data: bytes) -> OllamaEmbedRequest:
        return decode_request(data, OllamaEmbedRequest, {})

    def without_generation(self, context: ServerContext, body: OllamaEmbedRequest) -> OllamaEmbedReply | None:
        served_name(context, body.model)
        return None if body.texts else OllamaEmbedReply(model=body.model, embeddings=[])

    async def make_requests(
        self,
        context: ServerContext,
        body: OllamaEmbedRequest,
        caller: Caller,
        received_ns: int,
        scheduling: Mapping[str, Any],
    ) -> Prepared:
        translated = _translated(context, body)
        if body.truncate is not False and not context.forwards:
            translated.input = [await _fitting(context, text) for text in body.texts]
        return await EMBEDDINGS.make_requests(context, translated, caller, received_ns, scheduling)

    def reply_format(
        self,
        context: ServerContext,
        body: OllamaEmbedRequest,
        group: Sequence[Request],
        identity: ReplyIdentity,
        echoes: Sequence[Echo],
    ) -> ReplyFormat:
        return OllamaEmbedReplies(context, _translated(context, body), identity, body.model)


class OllamaEmbeddings(Api[OllamaEmbeddingsRequest]):
    """The vector of one text, in Ollama's older shapes."""

    prefix = "ollama-embeddings-"
    takes_any_type = True

    def decode(self, data: bytes) -> OllamaEmbeddingsRequest:
        return decode_request(data, OllamaEmbeddingsRequest, {})

    def without_generation(self, context: ServerContext, body: OllamaEmbeddingsRequest) -> OllamaEmbeddingsReply | None:
        served_name(context, body.model)
        return None if body.prompt else OllamaEmbeddingsReply(embedding=[])

    async def make_requests(
        self,
        context: ServerContext,
        body: OllamaEmbeddingsRequest,
        caller: Caller,
        received_ns: int,
        scheduling: Mapping[str, Any],
    ) -> Prepared:
        with native_fields({"input": "prompt"}):
            return await EMBEDDINGS.make_requests(
                context, self._translated(context, body), caller, received_ns, scheduling
            )

    def reply_format(
        self,
        context: ServerContext,
        body: OllamaEmbeddingsRequest,
        group: Sequence[Request],
        identity: ReplyIdentity,
        echoes: Sequence[Echo],
    ) -> ReplyFormat:
        return OllamaEmbeddingsReplies(context, self._translated(context, body), identity, "prompt")

    def _translated(self, context: ServerContext, body: OllamaEmbeddingsRequest) -> EmbeddingRequest:
        return EmbeddingRequest(model=served_name(context, body.model), input=body.prompt or "", normalize=False)


def _translated(context: ServerContext, body: OllamaEmbedRequest) -> EmbeddingRequest:
    size = body.dimensions or 0
    return EmbeddingRequest(
        model=served_name(context, body.model),
        input=[*body.texts],
        # As with Ollama, a vector is never longer than the model's.
        dimensions=size if size and (context.forwards or size < context.facts.embedding_size) else None,
    )


async def _fitting(context: ServerContext, text: str) -> list[int]:
    """The tokens of a text up to the longest context. A special token at the end stays there."""
    token_ids = await context.requests.encoder.encode(text, add_special_tokens=True)
    longest = context.engine.max_model_len
    if len(token_ids) <= longest:
        return token_ids
    end = token_ids[-1:] if token_ids[-1] in context.tokenizer.special_bytes else []
    return token_ids[: longest - len(end)] + end


OLLAMA_EMBED = OllamaEmbed()
OLLAMA_EMBEDDINGS = OllamaEmbeddings()


async def ollama_embed(request: web.Request) -> web.StreamResponse:
    """The vectors of one or more texts, in Ollama's shapes."""
    return await answer(request, OLLAMA_EMBED)


async def ollama_embeddings(request: web.Request) -> web.StreamResponse:
    """The vector of one text, in Ollama's older shapes."""
    return await answer(request, OLLAMA_EMBEDDINGS)
