"""The header `Idempotency-Key`: however often a request comes with the same key, it runs once."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from eventlm.engine.request import IdempotencyKey
from eventlm.errors import InputError
from eventlm.server.errors import IDEMPOTENCY_HEADER
from eventlm.text.decoding import decode_object

_PATTERN = "^[!-~]{1,255}$"
#: A key as a client sends it.
KeyOfRequest = Annotated[str, Meta(pattern=_PATTERN)]
_KEY = re.compile(_PATTERN)
_DIGEST_BYTES = 16
#: The key of a request that has one, once its body was read.
IDEMPOTENCY_KEY = web.RequestKey("idempotency_key", IdempotencyKey)


def idempotency_key(request: web.Request, body: bytes) -> IdempotencyKey | None:
    """The key of a request with a JSON body; None without the header. Raises InputError for an invalid one.

    The same request has the same path and the same JSON: the order of fields and white space may differ.
    """
    sent = request.headers.getall(IDEMPOTENCY_HEADER, [])
    if not sent:
        return None
    if len(sent) > 1 or not _KEY.fullmatch(sent[0]):
        raise InputError(
            IDEMPOTENCY_HEADER,
            f"Invalid value for '{IDEMPOTENCY_HEADER}': it must be one key of 1 to 255 visible ASCII characters.",
        )
    content = msgspec.json.encode(decode_object(body), order="sorted")
    return IdempotencyKey(_digest(sent[0].encode()), _digest(request.path.encode() + b"\0" + content))


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()
