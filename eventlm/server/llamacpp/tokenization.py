"""`POST /tokenize` in llama.cpp's shapes, and `POST /apply-template`."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from msgspec import Struct

from eventlm.errors import InputError
from eventlm.server.context import CONTEXT, ServerContext, json_response, read_body
from eventlm.text.decoding import convert_request, decode_request
from eventlm.text.protocol import UNSUPPORTED_IN_CHAT, ChatCompletionRequest


class TokenizeContentRequest(Struct, kw_only=True):
    """Body of `POST /tokenize` for a text, as llama.cpp's clients send it.

    add_special: whether the tokenizer's special tokens are added. parse_special: whether the names of special tokens in
    the text stand for these tokens; false is refused for texts that have any.
    """

    model: str = ""
    content: str
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class TokenPiece(Struct, frozen=True):
    """A token with its text, or with its bytes if they are a part of a character."""

    id: int
    piece: str | list[int]


class TokenizedContent(Struct, frozen=True):
    """Reply of `/tokenize` for llama.cpp's clients."""

    tokens: list[int | TokenPiece]


class AppliedTemplate(Struct, frozen=True):
    """Reply of `/apply-template`."""

    prompt: str


async def tokenize_content(context: ServerContext, raw: dict[str, Any]) -> TokenizedContent:
    """The tokens of a body's text. Raises InputError."""
    body = convert_request(raw, TokenizeContentRequest, {})
    context = context.check_model(body.model)
    context.check_knows_tokens()
    tokenizer = context.tokenizer
    if body.parse_special is False:
        for data in tokenizer.special_bytes.values():
            if data.decode() in body.content:
                raise InputError(
                    "parse_special",
                    f"Invalid value for 'parse_special': false is not supported for a text with '{data.decode()}'.",
                )
    token_ids = await context.requests.encoder.encode(body.content, add_special_tokens=bool(body.add_special))
    if not body.with_pieces:
        return TokenizedContent([*token_ids])
    return TokenizedContent(
        [TokenPiece(token_id, _piece(tokenizer.raw_token_bytes(token_id))) for token_id in token_ids]
    )


async def apply_template(request: web.Request) -> web.Response:
    """The prompt that a conversation becomes."""
    context = request.app[CONTEXT]
    context.check_available()
    body = decode_request(await read_body(request), ChatCompletionRequest, UNSUPPORTED_IN_CHAT)
    context = context.check_model(body.model)
    context.check_knows_tokens()
    prompt = await context.requests.render_messages(body)
    return json_response(AppliedTemplate(prompt))


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
