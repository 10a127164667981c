"""`eventlm serve` with the default model: a real server run under load verifies, and the answers make sense."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from eventlm.events import Arrived, Finished, WorkerLost
from tests.cli.conftest import StartServer
from tests.cli.streams import Stream, until_all_have
from tests.processes import is_running, wait_until
from tests.serving import verified

NUM_CLIENTS = 16
QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]


async def test_some_clients_leave_and_a_worker_is_killed(start_server: StartServer) -> None:
    server = start_server("--kv-memory", "512MiB", "--max-model-len", "1024")
    leavers = range(0, NUM_CLIENTS, 4)
    async with server.async_client() as client:
        answer = await client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=24)
        assert "Tokyo" in (answer.choices[0].message.content or "")
        streams = [
            Stream(client, model="smollm2", prompt=f"Item {number}:", max_tokens=10, extra_body={"ignore_eos": True})
            for number in range(NUM_CLIENTS)
        ]
        for number in leavers:
            streams[number] = Stream(
                client, model="smollm2", prompt="A long list:", max_tokens=900, extra_body={"ignore_eos": True}
            )
        running = asyncio.gather(
            *(stream.run(leave_after=4 if number in leavers else None) for number, stream in enumerate(streams))
        )
        await until_all_have(streams, 1)
        os.kill(server.worker_pids[0], signal.SIGKILL)
        await running
    assert [stream.error for stream in streams if stream.error is not None] == []
    for number, stream in enumerate(streams):
        assert number in leavers or stream.finish_reason == "length"
    wait_until(lambda: "worker lost" in server.stderr)
    # Before the server stops, which would end what runs.
    wait_until(lambda: len(verified(server.trace, check_invariants=False).of(Finished)) == NUM_CLIENTS + 1)
    trace = server.stop_and_verify()
    assert len(trace.of(Arrived)) == NUM_CLIENTS + 1
    assert len(trace.of(WorkerLost)) == 1
    assert len(trace.cancelled_by_clients) == trace.finish_reasons["cancelled"] == len(leavers)
    assert trace.finish_reasons["length"] >= NUM_CLIENTS - len(leavers)


def test_a_signal_while_the_model_is_loaded(start_server: StartServer) -> None:
    server = start_server("--kv-memory", "64MiB", "--max-model-len", "512", wait=False)
    server.log_event("loading")
    workers = server.worker_pids
    # Before the server knew what it is to do, so that it could load this meanwhile.
    assert [Path(f"/proc/{pid}/cmdline").read_text().split("\0")[-2] for pid in workers] == ["torch"]
    assert server.stop(number=signal.SIGINT) == 0
    assert not any(map(is_running, workers))
    assert "Traceback" not in server.stderr
