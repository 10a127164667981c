"""Paths that are refused by name: the error says why, in the form of the path's API."""

from __future__ import annotations

import pytest

from eventlm.server.refusals import RefusedPath, why_refused
from tests.server.conftest import INVALID, RunningServer, assert_error

REFUSED = (RefusedPath("/a(/b)?", "first"), RefusedPath("/a.*", "second"))


@pytest.mark.parametrize(
    ("path", "why"), [("/a", "first"), ("/a/b", "first"), ("/a/c", "second"), ("/b", ""), ("x/a", "")]
)
def test_the_first_pattern_of_a_whole_path_counts(path: str, why: str) -> None:
    assert why_refused(REFUSED, path) == why


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/infill", 404), ("POST", "/slots/0?action=save", 404), ("POST", "/props", 405), ("GET", "/rerank", 404)],
)
def test_over_a_socket(server: RunningServer, method: str, path: str, status: int) -> None:
    reply = server.request(method, path, b"{}", {"Content-Type": "application/json"})
    words = f"{method} {path.partition('?')[0]} is not supported: "
    assert_error(reply, status, INVALID, None, "not_supported", message=words)
    assert ("allow" in reply.headers) == (status == 405)


def test_a_key_is_asked_for_first(start_server) -> None:
    assert_error(start_server(api_key="secret").request("POST", "/infill"), 401, INVALID)
