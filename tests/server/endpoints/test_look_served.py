"""The dashboard's endpoints of real servers: with front ends, without a record, and under load."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.processes import wait_until
from tests.server.auth.test_api_keys import TWO_KEYS, bearer, write
from tests.server.dashboard.watching import Watching
from tests.serving import Server, serve

OPS = bearer("sk-ops")
#: Steps of 20 ms, two rows each.
SLOW = ("--model", "fake", "--fake", "base_ns=20000000", "--max-num-seqs", "2", "--api-keys-file", "keys.toml")


@pytest.fixture(scope="module", params=[0, 2], ids=["in one process", "two front ends"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    write(folder / "keys.toml", TWO_KEYS.replace("requests_per_minute = 60, tokens_per_minute = 1_000", ""))
    with serve(folder, *SLOW, "--api-servers", str(request.param)) as server:
        yield server


def get(server: Server, path: str) -> Any:
    return server.request("GET", path, headers=OPS)


class Load:
    """Eight requests of so many tokens on threads of their own."""

    def __init__(self, server: Server, num_tokens: int) -> None:
        async def run() -> None:
            async with server.async_client(api_key="sk-alice") as client:
                create = client.completions.create
                calls = (create(model=server.model, prompt="hi", max_tokens=num_tokens) for _ in range(8))
                await asyncio.gather(*calls)

        self._thread = threading.Thread(target=lambda: asyncio.run(run()))
        self._thread.start()

    def join(self) -> None:
        self._thread.join()


def test_frames_and_reasons_under_load(server: Server) -> None:
    load = Load(server, 30)
    wait_until(lambda: get(server, "/admin/look/requests").json()["status"]["num_waiting"] > 2)
    found = get(server, "/admin/look/requests?limit=2").json()
    assert [each["wait"]["cause"] for each in found["waiting"]] == ["sequence_limit"] * 2
    assert [each["index"] for each in found["running"]] == [0, 0]
    assert found["waiting"][0]["request"] < found["waiting"][1]["request"]
    # On several connections, so that each front end has some.
    with ExitStack() as stack:
        streams = [stack.enter_context(closing(Watching(server.url))) for _ in range(6)]
        for stream in streams:
            events = stream.events()
            assert next(events)[1]["frame"]["num_running"] == 2
            frame = next(events)[1]["frame"]
            assert frame["generation_tokens_per_s"] > 20
            assert frame["batch_size"]["count"] > 10
            assert 0.9e9 < frame["end_ns"] - frame["start_ns"] < 30e9
    load.join()


def test_a_report_or_why_there_is_none(server: Server) -> None:
    assert get(server, "/admin/look/report?minutes=1").status in (200, 501)


def test_who_may_is_the_same_everywhere(server: Server) -> None:
    for path in ("live", "requests", "report"):
        assert server.request("GET", f"/admin/look/{path}").status == 401
        assert server.request("GET", f"/admin/look/{path}", headers=bearer("sk-alice")).status == 403


@pytest.mark.parametrize("num_front_ends", [0, 1])
def test_a_server_with_watchers_ends_in_order_and_one_without_a_record_says_so(
    tmp_path: Path, num_front_ends: int
) -> None:
    write(tmp_path / "keys.toml", TWO_KEYS)
    server = Server(tmp_path, *SLOW, "--no-record", "--api-servers", str(num_front_ends))
    try:
        server.wait_ready()
        refused = get(server, "/admin/look/report")
        assert (refused.status, refused.json()["error"]["code"]) == (409, "not_recorded")
        with closing(Watching(server.url)) as stream:
            events = stream.events()
            assert next(events)[1]["is_recording"] is False
            assert server.stop() == 0
            assert all(name == "message" for name, _ in events)
        assert "Traceback" not in server.stderr
        assert '"level":"error"' not in server.stderr
    finally:
        server.close()
