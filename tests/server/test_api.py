"""All APIs: their ids tell them apart."""

from __future__ import annotations

from itertools import permutations

from eventlm.server.app import ALL_APIS, APIS_BY_PREFIX, ENDPOINTS


def test_the_id_of_a_reply_tells_its_api() -> None:
    prefixes = [api.prefix for api in ALL_APIS]
    assert all(prefixes)
    assert not [pair for pair in permutations(prefixes, 2) if pair[0].startswith(pair[1])]
    assert list(APIS_BY_PREFIX.values()) == [*ALL_APIS]


def test_batches_name_an_api_by_the_path_of_its_endpoint() -> None:
    paths = {api.path for api in APIS_BY_PREFIX.values() if api.path}
    assert paths >= {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"}
    assert paths <= {endpoint.path for endpoint in ENDPOINTS if endpoint.generates}
