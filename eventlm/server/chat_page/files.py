"""The files of the chat page and the handlers that serve them.

The browser may run only scripts and styles of this server and may connect only to it, so that nothing a model writes
can load or run anything. The files are small and change only with the version: a browser asks each time whether its
copy is current.
"""

from __future__ import annotations

from hashlib import blake2b
from importlib import resources
from typing import NamedTuple

from aiohttp import web

from eventlm.page.document import SERVED_HEADERS
from eventlm.page.linker import STATIC
from eventlm.server.endpoints.openapi import Endpoint
from eventlm.server.middleware import CHAT_PAGE_FOLDER

_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class _File(NamedTuple):
    data: bytes
    media_type: str
    etag: str


def _read() -> dict[str, _File]:
    """Every file by name, without what an editor may have left there, and the theme that all pages share."""
    files = {}
    for path in (STATIC / "theme.css", *(resources.files(__package__) / "static").iterdir()):
        media_type = _MEDIA_TYPES.get("." + path.name.rpartition(".")[2])
        if media_type is not None:
            data = path.read_bytes()
            files[path.name] = _File(data, media_type, blake2b(data, digest_size=16).hexdigest())
    return files


_FILES = _read()
_PAGE = _FILES.pop("index.html")


async def chat_page(request: web.Request) -> web.Response:
    """A page to talk to the model in a browser."""
    return _reply(request, _PAGE)


async def chat_page_file(request: web.Request) -> web.Response:
    """A script, style or picture of the chat page."""
    file = _FILES.get(request.match_info["file"])
    if file is None:
        raise web.HTTPNotFound
    return _reply(request, file)


def _reply(request: web.Request, file: _File) -> web.Response:
    """The file, or a 304 if the browser's copy is current."""
    sent = request.if_none_match or ()
    if any(etag.value in (file.etag, "*") for etag in sent):
        response = web.Response(status=304, headers=SERVED_HEADERS)
    else:
        response = web.Response(body=file.data, content_type=file.media_type, charset="utf-8", headers=SERVED_HEADERS)
    response.etag = file.etag
    return response


#: Unless the server runs with --no-ui. The page itself needs no key; the requests that it sends do.
CHAT_PAGE_ENDPOINTS = (
    Endpoint("GET", "/", chat_page, media_types=("text/html",), scope=None),
    Endpoint("GET", CHAT_PAGE_FOLDER + "{file}", chat_page_file, media_types=tuple(_MEDIA_TYPES.values()), scope=None),
)
