from __future__ import annotations

import json

import pytest

from eventlm.client.errors import from_status, from_transport, message_of, retry_after_seconds, server_message

URL = "http://127.0.0.1:8000/v1/models"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"error": {"message": "too\nlong"}}, "too long"),
        ({"error": "plain"}, "plain"),
        ({"message": "inside"}, "inside"),
        ({"detail": [{"loc": ["body"]}]}, '[{"loc":["body"]}]'),
        ({"error": None, "detail": "fastapi"}, "fastapi"),
        ("text", "text"),
        ("  ", None),
        ({}, None),
        (5, None),
    ],
)
def test_where_servers_put_their_message(value: object, expected: str | None) -> None:
    assert message_of(value) == expected
    assert server_message(json.dumps(value).encode()) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [(b"plain\n text", "plain text"), (b"<html>gateway</html>", None), (b"  ", None), (b"\xff", "\ufffd")],
)
def test_bodies_that_are_not_json(body: bytes, expected: str | None) -> None:
    assert server_message(body) == expected


def test_a_long_message_is_cut() -> None:
    message = message_of("x" * 501)
    assert message is not None
    assert (len(message), message[-1]) == (500, "…")
    assert message_of("x" * 500) == "x" * 500


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [(404, b"<html>", "protocol"), (404, b'{"error":"no model"}', "http"), (500, b"", "http"), (401, b"", "http")],
)
def test_an_error_status(status: int, body: bytes, kind: str) -> None:
    error = from_status(URL, status, "Reason", body, {}, has_key=False)
    assert (error.kind, error.status) == (kind, status)
    assert f"HTTP {status}" in str(error)


def test_a_refused_key_says_how_to_give_one() -> None:
    texts = [str(from_status(URL, 401, "Unauthorized", b"", {}, has_key=has_key)) for has_key in (False, True)]
    assert ["EVENTLM_API_KEY" in text for text in texts] == [True, False]


def test_a_server_that_falls_silent() -> None:
    error = from_transport(URL, TimeoutError(), timeout_seconds=2.5)
    assert (error.kind, error.status) == ("timeout", None)
    assert "2.5 s" in str(error)
    assert from_transport(URL, ValueError("odd"), timeout_seconds=1).kind == "connection"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "3"}, 3.0),
        ({"Retry-After": " 0.25 "}, 0.25),
        ({"Retry-After": "-1"}, 0.0),
        ({"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT", "Date": "Fri, 31 Dec 1999 23:59:29 GMT"}, 30.0),
        ({"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT", "Date": "Sat, 01 Jan 2000 00:00:00 GMT"}, 0.0),
        ({"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"}, None),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "inf"}, None),
        ({"Retry-After": "nan"}, None),
        ({}, None),
    ],
)
def test_when_a_server_wants_to_be_asked_again(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_seconds(headers) == seconds
    assert from_status(URL, 503, "Busy", b"", headers, has_key=False).retry_after_s == seconds
