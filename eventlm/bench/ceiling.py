"""What this client can consume: tokens per second from a server that does next to nothing."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from eventlm.bench.load import Endpoint, Load
from eventlm.bench.records import LoadRequest
from eventlm.client.openai_client import OpenAIClient
from eventlm.errors import EventLMError

#: Above this share of the ceiling a result measures the client as much as the server.
SAFE_SHARE = 0.5
_SECONDS = 1.0
_TOKENS_A_REQUEST = 512
_MAX_STREAMS = 256


async def measure_ceiling(endpoint: Endpoint, *, num_streams: int = 64, seconds: float = _SECONDS) -> float:
    """Tokens per second of the load's own code against a null server in a process of its own, over so many streams.

    Raises EventLMError if that fails.
    """
    num_streams = min(num_streams, _MAX_STREAMS)
    body = {"model": "null", "prompt": "x" * 512, "max_tokens": _TOKENS_A_REQUEST}
    requests = (LoadRequest(index, body) for index in count())
    async with _null_server() as url, OpenAIClient(url, timeout_seconds=30.0) as client:
        load = Load(client, endpoint, requests, max_concurrency=num_streams, duration_ns=int(seconds * 1e9))
        result = await load.run(asyncio.Event())
    failed = next((record.message for record in result.records if not record.is_success), None)
    if failed is not None or not result.duration_ns:
        raise EventLMError(f"the client's ceiling could not be measured: {failed}; --no-ceiling goes on without it")
    num_tokens = sum(record.output_tokens for record in result.records)
    return num_tokens / (result.duration_ns / 1e9)


@asynccontextmanager
async def _null_server() -> AsyncIterator[str]:
    """A null server's URL; its process ends with the block, and also when this process dies."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "eventlm.bench.null_server",
        stdin=pipe,
        stdout=pipe,
        # Ctrl-C is for this process; the null server ends with its standard input.
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        port = (await process.stdout.readline()).decode().strip()
        if not port:
            raise EventLMError("the client's ceiling could not be measured: the null server did not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stdin.close()
        await process.wait()
