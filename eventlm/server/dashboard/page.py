"""The dashboard's page: a shell without data, so it needs no key. Its script asks for one, and reads with it.

The same policy holds as for the chat page.
"""

from __future__ import annotations

from importlib import resources

from aiohttp import web

from eventlm.page.document import served_page
from eventlm.page.linker import link, link_styles
from eventlm.server.chat_page.files import ICON
from eventlm.server.endpoints.openapi import Endpoint
from eventlm.server.middleware import DASHBOARD_FOLDER, DASHBOARD_PATH
from eventlm.server.page_files import PAGE_MEDIA_TYPES, PageFile

STATIC = resources.files(__package__) / "static"


def _read() -> dict[str, PageFile]:
    """By name; the page itself has none. Their names are relative, so that they are found behind any proxy."""
    folder = DASHBOARD_FOLDER.removeprefix("/")
    page = served_page("eventlm dashboard", f"{folder}page.js", f"{folder}page.css", f"{folder}icon.svg")
    return {
        "": PageFile.of(page.encode(), ".html"),
        "page.js": PageFile.of(link("dashboard.js", STATIC).encode(), ".js"),
        "page.css": PageFile.of(link_styles(STATIC).encode(), ".css"),
        "icon.svg": ICON,
    }


_FILES = _read()
_PAGE = _FILES.pop("")


async def dashboard(request: web.Request) -> web.Response:
    """A page that shows what the server does, to operators."""
    return _PAGE.reply(request)


async def dashboard_file(request: web.Request) -> web.Response:
    """The script, the styles or the picture of the dashboard."""
    file = _FILES.get(request.match_info["file"])
    if file is None:
        raise web.HTTPNotFound
    return file.reply(request)


#: Unless the server runs with --no-ui.
DASHBOARD_ENDPOINTS = (
    Endpoint("GET", DASHBOARD_PATH, dashboard, media_types=("text/html",), scope=None),
    Endpoint(
        "GET", DASHBOARD_FOLDER + "{file}", dashboard_file, media_types=tuple(PAGE_MEDIA_TYPES.values()), scope=None
    ),
)
