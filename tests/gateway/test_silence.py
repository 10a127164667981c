"""When the wait for a server is over. `test_client` has the same over sockets."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol

from eventlm.gateway.silence import Silence


@pytest.fixture
async def content() -> aiohttp.StreamReader:
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.transport = asyncio.Transport()
    return aiohttp.StreamReader(protocol, 2**16, loop=loop)


def from_now(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_the_first_sign_of_life_may_be_late(content: aiohttp.StreamReader) -> None:
    with Silence(content, from_now(0.02), 0.02), pytest.raises(TimeoutError):
        await content.readany()


async def test_each_sign_of_life_extends_the_wait(content: aiohttp.StreamReader) -> None:
    loop = asyncio.get_running_loop()
    with Silence(content, from_now(60), 60) as silence:
        silence.extend(0.05)
        start = loop.time()
        loop.call_later(0.03, silence.extend, 0.05)
        with pytest.raises(TimeoutError):
            await content.readany()
        assert 0.07 < loop.time() - start < 30


async def test_what_is_still_unread_is_no_silence(content: aiohttp.StreamReader) -> None:
    with Silence(content, from_now(60), 60) as silence:
        silence.extend(0.01)
        content.feed_data(b"abc")
        await asyncio.sleep(0.03)
        assert await content.readany() == b"abc"
        silence.num_read += 3
        # Read, but no sign of life.
        with pytest.raises(TimeoutError):
            await content.readany()


async def test_nothing_is_left_after_it(content: aiohttp.StreamReader) -> None:
    with Silence(content, from_now(0.01), 0.01):
        pass
    await asyncio.sleep(0.02)
    assert content.exception() is None
