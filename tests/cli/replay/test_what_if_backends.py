"""A what-if of what a real gateway recorded, with failures, and clients that leave."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import openai

from eventlm.events import Cancelled, ForwardFailed
from eventlm.replay.rebuild import Changes
from eventlm.replay.verify.verifier import verify
from eventlm.replay.what_if.engine import Alternative
from eventlm.replay.what_if.what_if import what_if
from tests.cli.conftest import StartServer
from tests.gateway.stub_backend import StubBackend
from tests.gateway.stub_faults import Fault


async def test_a_gateways_run_is_repeated_and_asked(start_server: StartServer) -> None:
    faults = [Fault("status", every=5, status=500), Fault("cut", every=7, after=3)]
    async with (
        StubBackend("vllm", num_tokens=12, first_delay=0.005, token_delay=0.01, faults=faults, cache_blocks=50) as one,
        StubBackend("llamacpp", num_tokens=12, first_delay=0.005, token_delay=0.01, max_concurrency=2) as other,
    ):
        flags = ("--backend", one.url, "--backend", other.url, "--retry-backoff-ms", "5", "--probe-interval-ms", "50")
        server = await asyncio.to_thread(start_server, *flags)
        client = server.async_client()

        async def ask(number: int) -> None:
            await asyncio.sleep(number * 0.01)
            text = f"{'once upon a time ' * 20}{number}"
            # Some clients leave after the first token; with some answers no backend can go on.
            with suppress(openai.APIError):
                stream = await client.completions.create(model="stub", prompt=text, max_tokens=10, stream=True)
                async for _ in stream:
                    if number % 6 == 0:
                        await stream.close()
                        break

        await asyncio.gather(*map(ask, range(40)))
        trace = await asyncio.to_thread(server.stop_and_verify)
    assert trace.of(ForwardFailed)
    assert trace.of(Cancelled)
    alternatives = [Alternative(changes=Changes(router={"type": "round_robin"})), Alternative(num_replicas=1)]
    result = what_if(server.trace, alternatives, output=server.trace.parent / "out")
    assert result.null is not None
    assert result.null.num_decisions > 100
    for each in result.alternatives:
        assert each.outcome.num_unfinished == 0
        assert verify(each.run_folder).exit_code == 0
