"""Queries for pages, and pages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request
from msgspec import Raw

from eventlm.errors import InputError
from eventlm.server.context import read_query
from eventlm.server.responses.paging import PageQuery, item_list


@pytest.mark.parametrize(
    ("query", "fields"),
    [
        ("", {}),
        ("?limit=100&order=asc&after=msg_1", {"limit": 100, "order": "asc", "after": "msg_1"}),
        ("?include[]=message.output_text.logprobs&unknown=1", {}),
        ("?limit=5&limit=7", {"limit": 5}),
    ],
)
def test_a_query(query: str, fields: dict[str, Any]) -> None:
    assert read_query(make_mocked_request("GET", f"/{query}"), PageQuery) == PageQuery(**fields)


@pytest.mark.parametrize("query", ["?limit=", "?limit=1.5", "?limit=-1", "?order=", "?limit=1e9"])
def test_a_query_that_is_wrong(query: str) -> None:
    with pytest.raises(InputError) as error:
        read_query(make_mocked_request("GET", f"/{query}"), PageQuery)
    assert error.value.param in ("limit", "order")


def test_a_page() -> None:
    page = item_list([("a", Raw(b'{"id":"a"}')), ("b", Raw(b'{"id":"b"}'))], has_more=True)
    assert msgspec.json.decode(msgspec.json.encode(page)) == {
        "object": "list",
        "data": [{"id": "a"}, {"id": "b"}],
        "first_id": "a",
        "last_id": "b",
        "has_more": True,
    }
    empty = item_list([], has_more=False)
    assert (empty.first_id, empty.last_id) == (None, None)
