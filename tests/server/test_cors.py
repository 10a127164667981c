"""Web pages of other origins: nothing unless they are named, and a preflight without a key if they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from eventlm.config import ServerConfig
from eventlm.errors import UsageError
from eventlm.server.app import ENDPOINTS
from eventlm.server.cors import check_origins
from tests.server.conftest import INVALID, RunningServer, assert_error

PAGE = "https://chat.example.com"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
KEY = {"Authorization": "Bearer secret"}


def cors_headers(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith("access-control") or name == "vary"}


def test_it_is_off_by_default(server: RunningServer) -> None:
    reply = server.request("OPTIONS", "/v1/completions", headers={"Origin": PAGE} | PREFLIGHT)
    assert_error(reply, 405, INVALID, None, "method_not_supported")
    assert not cors_headers(reply.headers)
    assert not cors_headers(server.request("GET", "/v1/models", headers={"Origin": PAGE}).headers)


def test_an_origin_that_is_named(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(cors_origin=["http://localhost:3000", PAGE], api_key="secret")
    reply = server.request("OPTIONS", "/v1/chat/completions", headers={"Origin": PAGE} | PREFLIGHT)
    assert reply.status == 204
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert reply.headers["access-control-allow-headers"] == "authorization, content-type"
    # Whatever the server has an endpoint for: DELETE ends a stream.
    methods = set(reply.headers["access-control-allow-methods"].split(", "))
    assert methods >= {endpoint.method for endpoint in ENDPOINTS}
    assert "access-control-allow-credentials" not in reply.headers
    body = {"model": "test", "prompt": "hi", "stream": True}
    stream = server.post("/v1/completions", body, {"Origin": PAGE} | KEY)
    assert stream.status == 200
    refused = server.post("/v1/completions", body, {"Origin": PAGE})
    assert refused.status == 401
    for reply in (stream, refused):
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert reply.headers["vary"] == "Origin"
        assert "x-ratelimit-remaining-tokens" in reply.headers["access-control-expose-headers"]


def test_an_origin_that_is_not(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(cors_origin=[PAGE], api_key="secret")
    for origin in ("https://evil.example.com", PAGE + ".evil.com", "null", "", PAGE.upper()):
        preflight = server.request("OPTIONS", "/v1/completions", headers={"Origin": origin} | PREFLIGHT)
        assert_error(preflight, 401, INVALID)
        assert cors_headers(preflight.headers) == {"vary": "Origin"}
    # Without a page in between nothing changes.
    assert server.request("GET", "/v1/models", headers=KEY).status == 200


def test_every_origin(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(cors_origin=["*"])
    reply = server.request("GET", "/v1/models", headers={"Origin": PAGE})
    assert reply.headers["access-control-allow-origin"] == "*"
    assert "vary" not in reply.headers


@pytest.mark.parametrize("origin", ["chat.example.com", PAGE + "/", PAGE + "/chat", "", "https://", "https://a b"])
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(UsageError, match="scheme://host"):
        check_origins(ServerConfig(cors_origin=[origin]))


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:1",
        "127.0.0.1:80",
        "[::1]:80",
        "a.localhost",
        "eventlm",
        "b.test",
        "host.docker.internal:8000",
        "box.local",
        "localhost.",
        "",
    ],
)
def test_a_name_of_this_machine(start_server: Callable[..., RunningServer], host: str) -> None:
    server = start_server(allowed_host=["B.test"])
    assert server.request("GET", "/v1/models", headers={"Host": host}).status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "b.test.evil.example", "127.0.0.1.evil.example"])
def test_a_name_that_was_bound_to_this_machine(start_server: Callable[..., RunningServer], host: str) -> None:
    headers = {"Host": host}
    refused = start_server(allowed_host=["b.test"]).request("GET", "/v1/models", headers=headers)
    assert_error(refused, 403, INVALID, None, "host_not_allowed", message="--allowed-host")
    # Whoever has the key may call it what they like.
    assert start_server(api_key="secret").request("GET", "/v1/models", headers=headers | KEY).status == 200


def test_forms_of_other_sites(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(cors_origin=[PAGE])
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    for origin in ("https://evil.example", "null", f"http://localhost:{server.port + 1}"):
        reply = server.request("POST", "/v1/files", b"--x--", form | {"Origin": origin})
        assert_error(reply, 403, INVALID, None, "origin_not_allowed", message=f"--cors-origin {origin}")
        assert server.request("POST", "/v1/batches/batch_1/cancel", headers={"Origin": origin}).status == 403
    # A browser asks before these, and vouches for pages behind a proxy that changes the host.
    assert server.request("DELETE", "/v1/files/file-1", headers={"Origin": "https://evil.example"}).status == 404
    proxied = form | {"Origin": "https://llm.example.com", "Sec-Fetch-Site": "same-origin"}
    assert server.request("POST", "/v1/files", b"--x--", proxied).status == 404
    for origin in (PAGE, f"http://127.0.0.1:{server.port}"):
        # There is no folder for files.
        assert server.request("POST", "/v1/files", b"--x--", form | {"Origin": origin}).status == 404
