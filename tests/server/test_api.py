"""All APIs: their ids tell them apart."""

from __future__ import annotations

from itertools import permutations

from eventlm.server.app import APIS_BY_PREFIX


def test_the_id_of_a_reply_tells_its_api() -> None:
    assert all(prefix == api.prefix for prefix, api in APIS_BY_PREFIX.items())
    assert not [pair for pair in permutations(APIS_BY_PREFIX, 2) if pair[0].startswith(pair[1])]
