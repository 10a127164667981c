"""Random methods, paths and bodies through real sockets: each has an OpenAI-shaped error or a valid reply."""

from __future__ import annotations

import http.client
import random
import socket
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.http_exchange import Reply
from tests.processes import PATIENCE_SECONDS
from tests.server.described import Description, assert_idle
from tests.server.random_requests import RandomRequest, random_request
from tests.serving import Server, serve


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    fast = "base_ns=100000,prefill_token_ns=0,decode_ns=0,context_token_ns=0"
    flags = ("--model", "fake", "--max-model-len", "256", "--fake", fast)
    with serve(tmp_path_factory.mktemp("server"), *flags) as server:
        yield server


class Connection:
    """One that is kept alive for as long as the server keeps it."""

    def __init__(self, server: Server) -> None:
        parts = urlsplit(server.url)
        self._address = (parts.hostname, parts.port)
        self._socket: socket.socket | None = None

    def exchange(self, request: RandomRequest) -> Reply:
        """Send a request and read its reply."""
        if self._socket is None:
            self._socket = socket.create_connection(self._address, timeout=PATIENCE_SECONDS)
        self._socket.sendall(request.to_bytes())
        response = http.client.HTTPResponse(self._socket, method=request.method)
        response.begin()
        reply = Reply(response.status, dict(response.getheaders()), response.read())
        if response.will_close:
            self.close()
        return reply

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def run(server: Server, seed: int, num_requests: int) -> Counter[int]:
    """So many requests, one after the other; how many replies had which status."""
    draw = random.Random(seed)
    description = Description(server)
    paths = sorted(description.document["paths"])
    connection = Connection(server)
    statuses: Counter[int] = Counter()
    for number in range(num_requests):
        request = random_request(draw, paths, server.model)
        try:
            reply = connection.exchange(request)
            description.assert_holds(request.method, request.path, reply)
        except Exception as error:
            raise AssertionError(f"request {number} of seed {seed}: {str(request)[:2000]}") from error
        statuses[reply.status] += 1
    connection.close()
    assert_idle(server)
    return statuses


def test_every_reply_is_an_error_in_the_envelope_or_valid(server: Server) -> None:
    statuses = run(server, 1, 400)
    assert {200, 400, 404, 405, 415} <= statuses.keys(), statuses


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 6))
def test_every_reply_is_an_error_in_the_envelope_or_valid_at_length(server: Server, seed: int) -> None:
    run(server, seed, 2500)
