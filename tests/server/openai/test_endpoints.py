"""What the table of endpoints says of their parameters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec import structs

from eventlm.server.app import ENDPOINTS
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
