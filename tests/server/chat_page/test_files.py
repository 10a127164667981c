"""The chat page over HTTP: what is served, with which headers, and when it is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from eventlm.page.linker import STATIC as SHARED
from eventlm.server.chat_page import files
from tests.server.conftest import INVALID, RunningServer, assert_error
from tests.server.page_policy import POLICY

STATIC = Path(files.__file__).parent / "static"
FILES = [*STATIC.iterdir(), Path(str(SHARED)) / "theme.css"]
PATHS = {"/": STATIC / "index.html"} | {f"/ui/{path.name}": path for path in FILES if path.suffix != ".html"}
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
}


@pytest.mark.parametrize(("path", "file"), PATHS.items(), ids=PATHS)
def test_every_file_is_served_as_it_is(server: RunningServer, path: str, file: Path) -> None:
    reply = server.request("GET", path)
    assert (reply.status, reply.data) == (200, file.read_bytes())
    assert reply.headers["content-type"] == MEDIA_TYPES[file.suffix]
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"
    assert reply.headers["x-request-id"]
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    assert policy == POLICY


def test_a_head_has_the_headers_only(server: RunningServer) -> None:
    whole, head = server.request("GET", "/"), server.request("HEAD", "/")
    assert (head.status, head.data) == (200, b"")
    varying = {"date", "x-request-id"}
    assert {**head.headers, **dict.fromkeys(varying)} == {**whole.headers, **dict.fromkeys(varying)}


def test_a_browser_asks_whether_its_copy_is_current(server: RunningServer) -> None:
    first = server.request("GET", "/ui/main.js")
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for sent in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = server.request("GET", "/ui/main.js", headers={"If-None-Match": sent})
        assert (again.status, again.data, again.headers["etag"]) == (304, b"", tag)
        assert again.headers["cache-control"] == "no-cache"
    for sent in ('"other"', "not a tag", server.request("GET", "/ui/base.css").headers["etag"]):
        assert server.request("GET", "/ui/main.js", headers={"If-None-Match": sent}).data == first.data


def test_the_page_needs_no_key_and_the_api_does(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(api_key="secret")
    assert {server.request("GET", path).status for path in PATHS} == {200}
    assert server.request("GET", "/v1/models").status == 401


@pytest.mark.parametrize(
    "path", ["/ui/none.js", "/ui/", "/ui", "/ui/..%2ffiles.py", "/ui/../files.py", "/ui/index.html"]
)
def test_nothing_else_is_served(server: RunningServer, path: str) -> None:
    assert_error(server.request("GET", path), 404, INVALID, code="unknown_url")


def test_it_is_only_read(server: RunningServer) -> None:
    reply = server.request("POST", "/")
    assert_error(reply, 405, INVALID, code="method_not_supported")
    assert reply.headers["allow"] == "GET,HEAD"


@pytest.mark.parametrize("key", ["", "secret"])
def test_without_it_its_paths_are_unknown(start_server: Callable[..., RunningServer], key: str) -> None:
    server = start_server(ui=False, api_key=key)
    for path in PATHS.keys() - {"/"}:
        if key:
            assert_error(server.request("GET", path), 401, INVALID)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        assert_error(server.request("GET", path, headers=headers), 404, INVALID, code="unknown_url")
    paths = server.request("GET", "/openapi.json").json()["paths"]
    assert "/ui/{file}" not in paths
    assert list(paths["/"]["get"]["responses"]["200"]["content"]) == ["text/plain"]


def test_without_it_clients_of_ollama_still_learn_that_the_server_runs(
    start_server: Callable[..., RunningServer],
) -> None:
    server = start_server(ui=False, api_key="secret")
    whole, head = server.request("GET", "/"), server.request("HEAD", "/")
    assert (whole.status, whole.data) == (200, b"eventlm is running")
    assert whole.headers["content-type"] == "text/plain; charset=utf-8"
    assert (head.status, head.data) == (200, b"")


def test_it_is_described(server: RunningServer) -> None:
    paths = server.request("GET", "/openapi.json").json()["paths"]
    page, file = paths["/"]["get"], paths["/ui/{file}"]["get"]
    assert list(page["responses"]["200"]["content"]) == ["text/html"]
    assert "text/javascript" in file["responses"]["200"]["content"]
    assert "security" not in page


def test_it_asks_for_nothing_that_is_not_served() -> None:
    """Neither of this server nor of another, and nothing is inline, which the policy forbids."""
    page = (STATIC / "index.html").read_text()
    assert {f"/{target}" for target in re.findall(r'(?:src|href)="([^"#][^"]*)"', page)} <= PATHS.keys()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script>", page)
    for path in STATIC.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://\w", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|@import|url\(", text), (
            path
        )
        for module in re.findall(r'from "\./([^"]+)"', text):
            assert (STATIC / module).is_file(), (path, module)
