"""The files of the chat page and the handlers that serve them.

The browser may run only scripts and styles of this server and may connect only to it, so that nothing a model writes
can load or run anything. The files are small and change only with the version: a browser asks each time whether its
copy is current.
"""

from __future__ import annotations

from importlib import resources

from aiohttp import web

from eventlm.page.linker import STATIC
from eventlm.server.endpoints.openapi import Endpoint
from eventlm.server.middleware import CHAT_PAGE_FOLDER
from eventlm.server.page_files import PAGE_MEDIA_TYPES, PageFile


def _read() -> dict[str, PageFile]:
    """Every file by name, without what an editor may have left there, and the theme that all pages share."""
    files = {}
    for path in (STATIC / "theme.css", *(resources.files(__package__) / "static").iterdir()):
        suffix = "." + path.name.rpartition(".")[2]
        if suffix in PAGE_MEDIA_TYPES:
            files[path.name] = PageFile.of(path.read_bytes(), suffix)
    return files


_FILES = _read()
_PAGE = _FILES.pop("index.html")
#: Of all pages.
ICON = _FILES["icon.svg"]


async def chat_page(request: web.Request) -> web.Response:
    """A page to talk to the model in a browser."""
    return _PAGE.reply(request)


async def chat_page_file(request: web.Request) -> web.Response:
    """A script, style or picture of the chat page."""
    file = _FILES.get(request.match_info["file"])
    if file is None:
        raise web.HTTPNotFound
    return file.reply(request)


#: Unless the server runs with --no-ui. The page itself needs no key; the requests that it sends do.
CHAT_PAGE_ENDPOINTS = (
    Endpoint("GET", "/", chat_page, media_types=("text/html",), scope=None),
    Endpoint(
        "GET", CHAT_PAGE_FOLDER + "{file}", chat_page_file, media_types=tuple(PAGE_MEDIA_TYPES.values()), scope=None
    ),
)
