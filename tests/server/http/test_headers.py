"""The id of a request: the client's own if it is sane, else a fresh one."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from eventlm.server.http.headers import REQUEST_ID_HEADER, request_id


@pytest.mark.parametrize("sent", ["req-1", "a.b_c:d/e+f=g@h-9", "x" * 128])
def test_a_sane_id_is_echoed(sent: str) -> None:
    assert request_id(make_mocked_request("GET", "/", headers={REQUEST_ID_HEADER: sent})) == sent


@pytest.mark.parametrize("sent", ["", "two words", "x" * 129, "line\tbreak", "é"])
def test_any_other_is_replaced_by_a_fresh_one(sent: str) -> None:
    request = make_mocked_request("GET", "/", headers={REQUEST_ID_HEADER: sent})
    first, second = request_id(request), request_id(request)
    assert first.startswith("req-")
    assert len(first) == 36
    assert first != second
