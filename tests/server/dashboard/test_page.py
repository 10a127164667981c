"""The dashboard's shell over HTTP: what is served without a key, with which headers, and when it is not."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from eventlm.page.document import SERVED_POLICY
from tests.server.auth.test_api_keys import bearer
from tests.server.conftest import INVALID, RunningServer, assert_error
from tests.server.page_policy import POLICY

PATHS = {
    "/dashboard": "text/html; charset=utf-8",
    "/dashboard/page.js": "text/javascript; charset=utf-8",
    "/dashboard/page.css": "text/css; charset=utf-8",
    "/dashboard/icon.svg": "image/svg+xml; charset=utf-8",
}


def test_the_shell_needs_no_key_and_has_no_data(guarded: RunningServer) -> None:
    for path, media_type in PATHS.items():
        reply = guarded.request("GET", path)
        assert (reply.status, reply.headers["content-type"]) == (200, media_type)
        assert dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; ")) == POLICY
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert "set-cookie" not in reply.headers
        again = guarded.request("GET", path, headers={"If-None-Match": reply.headers["etag"]})
        assert (again.status, again.data) == (304, b"")
    page = guarded.request("GET", "/dashboard").data.decode()
    assert set(re.findall(r'(?:src|href)="([^"]*)"', page)) == {path[1:] for path in PATHS if path != "/dashboard"}
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script>|application/json", page)
    assert SERVED_POLICY.startswith("default-src 'none'")


@pytest.mark.parametrize("file", ["", "none.js", "..%2fpage.py", "dashboard.js"])
def test_nothing_else_is_served(guarded: RunningServer, file: str) -> None:
    reply = guarded.request("GET", f"/dashboard/{file}", headers=bearer("sk-alice"))
    assert_error(reply, 404, INVALID, code="unknown_url")


def test_without_pages_its_paths_are_unknown(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(ui=False)
    for path in PATHS:
        assert_error(server.request("GET", path), 404, INVALID, code="unknown_url")
    paths = server.request("GET", "/openapi.json").json()["paths"]
    assert "/dashboard" not in paths
    assert "/admin/look/live" in paths


def test_it_reads_and_writes_nothing_that_outlives_it(guarded: RunningServer) -> None:
    script = guarded.request("GET", "/dashboard/page.js").data.decode()
    own = script[script.index("/* live.js */") :]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|document\.cookie", own)
    # Only the choice of a theme is kept.
    assert set(re.findall(r"(?:local|session)Storage\.\w+\((\w+)", script)) <= {"KEY"}
