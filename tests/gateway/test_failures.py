"""Errors of backends in words. `test_client` has those that need a server."""

from __future__ import annotations

import aiohttp
import pytest

from eventlm.gateway.failures import from_status, from_transport, without_key


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (aiohttp.ConnectionTimeoutError(), "connect"),
        (aiohttp.SocketTimeoutError(), "timeout"),
        (TimeoutError(), "timeout"),
        (aiohttp.ServerDisconnectedError(), "broken"),
        (aiohttp.ClientPayloadError(), "broken"),
        (aiohttp.ClientConnectionError("Connection closed"), "broken"),
        (aiohttp.ClientConnectionResetError("Cannot write to closing transport"), "broken"),
        (OSError("odd"), "connect"),
    ],
)
def test_what_the_transport_raises(error: Exception, kind: str) -> None:
    found = from_transport("http://h", error, seconds=3)
    assert found.kind == kind
    assert "http://h" in str(found)


def test_errors_in_older_forms() -> None:
    body = b'{"object": "error", "message": "too long", "param": "prompt", "code": 400}'
    error = from_status("http://h", 400, "Bad Request", body, {}, key="")
    assert (str(error), error.param, error.code, error.kind) == ("too long", "prompt", "", "refused")
    error = from_status("http://h", 422, "Unprocessable", b'{"detail": [{"loc": ["n"]}]}', {}, key="")
    assert (str(error), error.kind) == ('[{"loc":["n"]}]', "refused")
    error = from_status("http://h", 502, "Bad Gateway", b"<html>", {}, key="")
    assert (str(error), error.kind) == ("http://h answered HTTP 502: Bad Gateway", "server")
    error = from_status("http://h", 400, "Bad Request", b"", {}, key="")
    assert str(error) == "The model's server does not take this request (HTTP 400)."


@pytest.mark.parametrize(
    ("asked", "seconds"), [("0.5", 0.5), ("1e300", 86_400), ("1000000000000", 86_400), ("-4", 0), ("nan", 0)]
)
def test_how_long_a_backend_wants_us_to_wait(asked: str, seconds: float) -> None:
    error = from_status("http://h", 429, "", b"", {"Retry-After": asked}, key="")
    assert error.retry_after_ns == seconds * 1e9


def test_a_key_is_cut_out() -> None:
    assert without_key("key abc is wrong", "abc") == "key *** is wrong"
    assert without_key("no key", "") == "no key"
