"""Files of the pages that the server has for browsers: small ones, which change only with the version."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

from aiohttp import web

from eventlm.page.document import SERVED_HEADERS

#: By the ends of their names.
PAGE_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class PageFile(NamedTuple):
    """One file."""

    data: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, data: bytes, suffix: str) -> PageFile:
        """A file whose name ends so."""
        return cls(data, PAGE_MEDIA_TYPES[suffix], blake2b(data, digest_size=16).hexdigest())

    def reply(self, request: web.Request) -> web.Response:
        """The file, or a 304 if the browser's copy is current."""
        sent = request.if_none_match or ()
        if any(etag.value in (self.etag, "*") for etag in sent):
            response = web.Response(status=304, headers=SERVED_HEADERS)
        else:
            response = web.Response(
                body=self.data, content_type=self.media_type, charset="utf-8", headers=SERVED_HEADERS
            )
        response.etag = self.etag
        return response
