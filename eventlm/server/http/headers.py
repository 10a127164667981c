"""Headers of every reply: the request's id and the server's name."""

from __future__ import annotations

import re
import secrets

from aiohttp import web

from eventlm.text.protocol import REQUEST_ID_PATTERN

REQUEST_ID_HEADER = "x-request-id"
#: aiohttp's default names its version and Python's.
SERVER_NAME = "eventlm"
#: Ids that are echoed. Others are replaced, so that logs and headers stay clean.
SANE_REQUEST_ID = re.compile(REQUEST_ID_PATTERN)


def request_id(request: web.BaseRequest) -> str:
    """The client's id for the request if it sent a sane one, else a fresh one."""
    sent = request.headers.get(REQUEST_ID_HEADER, "")
    return sent if SANE_REQUEST_ID.fullmatch(sent) else f"req-{secrets.token_hex(16)}"
