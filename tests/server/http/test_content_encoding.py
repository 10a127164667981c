"""Bodies that come compressed, and those that say so and are not."""

from __future__ import annotations

import gzip
import logging
import zlib
from collections.abc import Callable

import pytest

from tests.processes import wait_until
from tests.server.conftest import INVALID, RunningServer, assert_error, assert_serves

BODY = b'{"model": "test", "prompt": "x"}'


def raw_deflate(data: bytes) -> bytes:
    """Without zlib's head, as some clients take the name."""
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("X-GZIP", gzip.compress(BODY, mtime=0)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", raw_deflate(BODY)),
        ("identity", BODY),
        ("gzip, identity", gzip.compress(BODY, mtime=0)),
    ],
)
def test_what_is_decoded(server: RunningServer, encoding: str, data: bytes) -> None:
    reply = server.post("/v1/completions", data, {"Content-Encoding": encoding})
    assert reply.json()["choices"][0]["text"] == "Hello, world"


def test_what_becomes_many_pieces(start_server: Callable[..., RunningServer]) -> None:
    server = start_server()
    data = gzip.compress(BODY[:-1] + b" " * 3_000_000 + b"}", mtime=0)
    assert server.post("/v1/completions", data, {"Content-Encoding": "gzip"}).status == 200


@pytest.mark.parametrize("encoding", ["br", "zstd", "foo", "compress", "gzip, gzip", "gzip;q=1"])
def test_what_is_not(server: RunningServer, encoding: str) -> None:
    reply = server.post("/v1/completions", BODY, {"Content-Encoding": encoding})
    message = "The Content-Encoding must be one of gzip, deflate and identity"
    assert_error(reply, 415, INVALID, message=message)
    assert reply.headers["accept-encoding"] == "gzip, deflate"
    assert_serves(server)


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", BODY),
        ("gzip", gzip.compress(BODY, mtime=0)[:-3]),
        ("gzip", gzip.compress(BODY, mtime=0) + b"more"),
        ("gzip", gzip.compress(BODY, mtime=0) + gzip.compress(BODY, mtime=0)),
        ("gzip", gzip.compress(BODY, mtime=0)[:-8] + b"\0" * 8),
        ("deflate", BODY),
        ("deflate", zlib.compress(BODY)[:-2]),
    ],
)
def test_what_is_broken(server: RunningServer, encoding: str, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        reply = server.post("/v1/completions", data, {"Content-Encoding": encoding})
        assert_error(reply, 400, INVALID, message=f"body is broken: its Content-Encoding says {encoding}")
        assert_serves(server)
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []


def test_bombs(server: RunningServer) -> None:
    for data in (gzip.compress(b" " * 50_000_000, mtime=0), gzip.compress(BODY + b" " * 64 * 1024)):
        reply = server.post("/v1/completions", data, {"Content-Encoding": "gzip"})
        assert_error(reply, 413, INVALID, message="limit of 65536 bytes")
    wait_until(lambda: server.context.num_body_bytes == 0)
    assert_serves(server)
