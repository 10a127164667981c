"""`POST /v1/embeddings`: one vector for each input, made by pooling the hidden states of its tokens."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from eventlm.engine.backend import ForwardedRequest
from eventlm.engine.request import Request
from eventlm.errors import InputError
from eventlm.sampling_params import Pooling, SamplingParams
from eventlm.server.answer import answer
from eventlm.server.api import Api, Caller, Prepared
from eventlm.server.context import ServerContext
from eventlm.server.errors import internal_error
from eventlm.server.reply_format import ReplyFormat, ReplyIdentity
from eventlm.server.timings import EventlmReply
from eventlm.text.choice_output import ChoiceOutput
from eventlm.text.decoding import decode_request
from eventlm.text.echo import Echo
from eventlm.text.forwarding.bodies import decode_forwarded, encode_fields
from eventlm.text.generation import Generation
from eventlm.text.protocol import MAX_GROUP_SEQUENCES, Prompts, RequestFields
from eventlm.text.request_builder import read_prompts
from eventlm.text.tokenizer import Tokenizer

PARAM = "input"
#: vLLM's fields without support, each with the values that ask for nothing.
UNSUPPORTED_IN_EMBEDDINGS: dict[str, tuple[Any, ...]] = {
    "messages": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "truncation_side": ("left",),
}


#: Of forwarded bodies: what this server reads too, and the form of its own reply.
_REPLY_FIELDS = frozenset({"encoding_format", "normalize"})
_SHARED_FIELDS = _REPLY_FIELDS | {"input", "dimensions", "cache_salt"}


class EmbeddingRequest(RequestFields, kw_only=True):
    """Body of `POST /v1/embeddings`. `input` is a text, token ids, or a list of either.

    dimensions: keep only so many of the first ones. normalize: to length 1, which is done unless it is false.
    truncate_prompt_tokens: keep only so many of the last tokens of an input, -1: as many as fit the context. pooling:
    in place of the server's option.
    """

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    add_special_tokens: bool | None = None
    normalize: bool | None = None
    pooling: Pooling | None = None
    cache_salt: str | None = None


class ForwardedEmbeddingRequest(EmbeddingRequest, kw_only=True):
    """The same for a model that other servers run. passed: what is forwarded of it."""

    passed: dict[str, Any] = {}


class Embedding(Struct, frozen=True, kw_only=True):
    """The vector of one input: numbers, or their little-endian float32 bytes in base64."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Struct, frozen=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, frozen=True, kw_only=True):
    """Reply of `/v1/embeddings`, in the order of the inputs."""

    id: str
    object: str = "list"
    created: int
    model: str
    service_tier: str | UnsetType = UNSET
    eventlm: EventlmReply | UnsetType = UNSET
    data: list[Embedding]
    usage: EmbeddingUsage


class EmbeddingReplies(ReplyFormat):
    """Vectors in the order of the inputs."""

    prompt_param = PARAM

    def __init__(self, body: EmbeddingRequest, tokenizer: Tokenizer, identity: ReplyIdentity) -> None:
        super().__init__(tokenizer, identity)
        self._body = body

    def vectors(self, choices: Sequence[ChoiceOutput]) -> list[list[float] | str]:
        """Each input's, in the form that the body asks for."""
        if not all(output.embedding for output in choices):
            raise internal_error()
        return [_encode(output.embedding, self._body) for output in choices]

    def usage(self, generation: Generation) -> EmbeddingUsage:
        """Of all inputs."""
        num_tokens = generation.token_counts().prompt
        return EmbeddingUsage(num_tokens, num_tokens)

    async def whole(self, choices: Sequence[ChoiceOutput], generation: Generation) -> Any:
        return EmbeddingList(
            id=self.identity.reply_id,
            created=self.identity.created,
            model=self._body.model,
            service_tier=self._body.used_tier,
            data=[Embedding(index=index, embedding=vector) for index, vector in enumerate(self.vectors(choices))],
            usage=self.usage(generation),
        )


class Embeddings(Api[EmbeddingRequest]):
    """Vectors of texts."""

    prefix = "embd-"
    path = "/v1/embeddings"

    def decode(self, data: bytes) -> EmbeddingRequest:
        return decode_request(data, EmbeddingRequest, UNSUPPORTED_IN_EMBEDDINGS)

    def decode_forwarded(self, data: bytes) -> EmbeddingRequest:
        body = decode_forwarded(data, ForwardedEmbeddingRequest, _SHARED_FIELDS)
        # What a backend has made stays as it is.
        body.normalize = bool(body.normalize)
        return body

    async def make_requests(
        self,
        context: ServerContext,
        body: EmbeddingRequest,
        caller: Caller,
        received_ns: int,
        scheduling: Mapping[str, Any],
    ) -> Prepared:
        _check(context, body)
        return Prepared(await _group(context, body, received_ns, scheduling))

    def reply_format(
        self,
        context: ServerContext,
        body: EmbeddingRequest,
        group: Sequence[Request],
        identity: ReplyIdentity,
        echoes: Sequence[Echo],
    ) -> ReplyFormat:
        return EmbeddingReplies(body, context.tokenizer, identity)


EMBEDDINGS = Embeddings()


async def embeddings(request: web.Request) -> web.StreamResponse:
    """The vectors of one or more inputs."""
    return await answer(request, EMBEDDINGS)


def _check(context: ServerContext, body: EmbeddingRequest) -> None:
    context.check_model(body.model)
    if context.forwards:
        return
    if body.dimensions is not None and body.dimensions > context.facts.embedding_size:
        raise InputError(
            "dimensions",
            f"Invalid value for 'dimensions': this model's embeddings have {context.facts.embedding_size}, "
            f"got {body.dimensions}.",
        )
    kept, longest = body.truncate_prompt_tokens, context.engine.max_model_len
    if kept is not None and (kept == 0 or kept > longest):
        raise InputError(
            "truncate_prompt_tokens",
            f"Invalid value for 'truncate_prompt_tokens': expected 1 to {longest}, the longest context, or -1 for it, "
            f"got {kept}.",
        )


async def _group(
    context: ServerContext, body: EmbeddingRequest, received_ns: int, scheduling: Mapping[str, Any]
) -> list[Request]:
    """One request for each input. Raises InputError."""
    inputs = read_prompts(body.input, context.vocab_size, PARAM)
    if len(inputs) > MAX_GROUP_SEQUENCES:
        raise InputError(
            PARAM, f"Invalid value for '{PARAM}': at most {MAX_GROUP_SEQUENCES} inputs, got {len(inputs)}."
        )
    pooling = body.pooling or context.config.pooling
    params = context.requests.resolve(SamplingParams(max_tokens=None, pooling=pooling))
    return [
        context.requests.request(
            params,
            await _token_ids(context, body, each),
            param=PARAM,
            kind="pool",
            cache_salt=body.cache_salt,
            model=body.model,
            forwarded=_forwarded(body, each) if context.forwards else None,
            # A mean needs every hidden state.
            skip_cache_read=pooling == "mean",
            received_ns=received_ns,
            **scheduling,
        )
        for each in inputs
    ]


def _forwarded(body: EmbeddingRequest, text: str | list[int]) -> ForwardedRequest:
    """What a backend gets of one input."""
    if isinstance(body, ForwardedEmbeddingRequest):
        fields = {name: value for name, value in body.passed.items() if name not in _REPLY_FIELDS}
    else:
        fields = {} if body.dimensions is None else {"dimensions": body.dimensions}
    return ForwardedRequest(endpoint="embeddings", body=encode_fields(fields | {"input": text}))


async def _token_ids(context: ServerContext, body: EmbeddingRequest, text: str | list[int]) -> list[int]:
    kept = body.truncate_prompt_tokens
    if kept == -1:
        kept = context.engine.max_model_len
    if not isinstance(text, str):
        return text if kept is None else text[-kept:]
    add_special_tokens = body.add_special_tokens is not False
    token_ids = await context.requests.encoder.encode(text, add_special_tokens=add_special_tokens)
    if kept is None or len(token_ids) <= kept:
        return token_ids
    plain = await context.requests.encoder.encode(text, add_special_tokens=False)
    return _truncated(token_ids, plain, kept)


def _truncated(token_ids: list[int], plain: list[int], kept: int) -> list[int]:
    """The last tokens of a text, with the special ones that its encoding (`token_ids`) has around it (`plain`)."""
    num_special = len(token_ids) - len(plain)
    before = next((start for start in range(num_special + 1) if token_ids[start : start + len(plain)] == plain), None)
    if before is None or kept <= num_special:
        return token_ids[-kept:]
    return token_ids[:before] + plain[num_special - kept :] + token_ids[before + len(plain) :]


def _encode(data: bytes, body: EmbeddingRequest) -> list[float] | str:
    """The reply's form of a vector, from little-endian float32."""
    vector = array("f", data)
    if sys.byteorder == "big":
        vector.byteswap()
    vector = vector[: body.dimensions]
    length = math.hypot(*vector)
    if body.normalize is not False and length > 0:
        vector = array("f", [value / length for value in vector])
    if body.encoding_format != "base64":
        return vector.tolist()
    if sys.byteorder == "big":
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()
