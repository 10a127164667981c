"""What the table of endpoints says of their parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from eventlm.server.app import ENDPOINTS, PAGE_ENDPOINTS
from eventlm.server.endpoints.openapi import Endpoint


def _fields(endpoint: Endpoint) -> Iterator[str]:
    bodies = endpoint.body if isinstance(endpoint.body, tuple) else (endpoint.body,)
    for body in bodies:
        if body is not None:
            yield from (field.encode_name for field in structs.fields(body))


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: f"{endpoint.method} {endpoint.path}")
def test_no_parameter_has_two_fates(endpoint: Endpoint) -> None:
    assert not endpoint.ignored.keys() & endpoint.refused.keys()
    if endpoint.ignored or endpoint.refused:
        assert endpoint.body is not None
        assert set(_fields(endpoint)) - endpoint.ignored.keys() - endpoint.refused.keys()


def test_the_page_lists_what_needs_no_key() -> None:
    page = (Path(__file__).parents[3] / "docs" / "http-api.md").read_text()
    sentence = page.partition("work without a key;")[2].partition("and the pages.")[0]
    listed = re.findall(r"`(/[^`]*)`", sentence)
    keyless = {endpoint.path for endpoint in ENDPOINTS if endpoint.scope is None and endpoint not in PAGE_ENDPOINTS}
    assert sorted(listed) == sorted(keyless)
