"""A file of a page: its media type, and when a browser's copy of it is current."""

from __future__ import annotations

from aiohttp.test_utils import make_mocked_request

from eventlm.server.page_files import PageFile


def test_a_copy_is_current_while_the_bytes_are_the_same() -> None:
    file = PageFile.of(b"body {}", ".css")
    first = file.reply(make_mocked_request("GET", "/x.css"))
    assert (first.status, first.body, first.content_type) == (200, b"body {}", "text/css")
    tag = first.headers["ETag"]
    again = file.reply(make_mocked_request("GET", "/x.css", headers={"If-None-Match": tag}))
    assert (again.status, again.headers["ETag"]) == (304, tag)
    assert again.headers["Content-Security-Policy"] == first.headers["Content-Security-Policy"]
    changed = PageFile.of(b"p {}", ".css").reply(make_mocked_request("GET", "/", headers={"If-None-Match": tag}))
    assert changed.status == 200
