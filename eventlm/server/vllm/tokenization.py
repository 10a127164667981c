"""`POST /tokenize` and `POST /detokenize`, also under /v1: between texts and token ids, in vLLM's shapes.

Bodies with `content` are llama.cpp's.
"""

from __future__ import annotations

from aiohttp import web
from msgspec import Struct

from eventlm.errors import InputError
from eventlm.sampling_params import TokenId
from eventlm.server.context import CONTEXT, json_response, read_body
from eventlm.server.llamacpp.tokenization import tokenize_content
from eventlm.text.decoding import convert_request, decode_object, decode_request
from eventlm.text.protocol import UNSUPPORTED_IN_CHAT, ChatCompletionRequest
from eventlm.text.request_builder import check_token_ids


class TokenizeRequest(Struct, kw_only=True):
    """Body of `POST /tokenize` for a text, as /v1/completions takes it."""

    model: str = ""
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatCompletionRequest, kw_only=True):
    """Body of `POST /tokenize` for a conversation: what /v1/chat/completions takes gives the same tokens."""

    return_token_strs: bool | None = None


class Tokenization(Struct, frozen=True, kw_only=True):
    """Reply of `/tokenize`. `token_strs`: each token as the vocabulary spells it, where asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """Body of `POST /detokenize`."""

    model: str = ""
    tokens: list[TokenId]


class Detokenization(Struct, frozen=True):
    """Reply of `/detokenize`: the text of the tokens, special ones included. `content` is llama.cpp's name for it."""

    prompt: str
    content: str


async def tokenize(request: web.Request) -> web.Response:
    """The tokens of a text or of a conversation."""
    context = request.app[CONTEXT]
    context.check_available()
    raw = decode_object(await read_body(request))
    if "content" in raw:
        return json_response(await tokenize_content(context, raw))
    body: TokenizeRequest | TokenizeChatRequest
    if raw.get("messages") is None:
        body = convert_request(raw, TokenizeRequest, {})
        context = context.check_model(body.model)
        context.check_knows_tokens()
        token_ids = await context.requests.encoder.encode(
            body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
    elif raw.get("prompt") is not None:
        raise InputError("prompt", "'prompt' and 'messages' exclude each other.")
    else:
        body = convert_request(raw, TokenizeChatRequest, UNSUPPORTED_IN_CHAT)
        context = context.check_model(body.model)
        context.check_knows_tokens()
        token_ids = await context.requests.encode_messages(body)
    return json_response(
        Tokenization(
            count=len(token_ids),
            max_model_len=context.engine.max_model_len,
            tokens=token_ids,
            token_strs=await context.requests.encoder.token_strings(token_ids) if body.return_token_strs else None,
        )
    )


async def detokenize(request: web.Request) -> web.Response:
    """The text of tokens."""
    context = request.app[CONTEXT]
    context.check_available()
    body = decode_request(await read_body(request), DetokenizeRequest, {})
    context = context.check_model(body.model)
    context.check_knows_tokens()
    check_token_ids(body.tokens, context.vocab_size, "tokens")
    text = await context.requests.encoder.decode(body.tokens)
    return json_response(Detokenization(text, text))
