"""The dashboard's endpoints of real servers: with front ends, without a record, and under load."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
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


@contextmanager
def load(server: Server) -> Iterator[None]:
    """Eight requests on a thread of their own, which are cancelled in the end."""
    loop = asyncio.new_event_loop()

    async def run() -> None:
        async with server.async_client(api_key="sk-alice") as client:
            create = client.completions.create
            await asyncio.gather(*(create(model=server.model, prompt="hi", max_tokens=4000) for _ in range(8)))

    task = loop.create_task(run())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait({task})))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()


def causes(listed: list[Any]) -> list[str | None]:
    return [each["wait"] and each["wait"]["cause"] for each in listed]


def test_frames_and_reasons_under_load(server: Server) -> None:
    def listed() -> Any:
        return get(server, "/admin/look/requests?limit=2").json()

    with load(server), ExitStack() as stack:
        wait_until(
            lambda: [(each["wait"] or {}).get("cause") for each in listed()["waiting"]] == ["sequence_limit"] * 2
        )
        found = listed()
        assert (found["num_requests"], found["num_waiting"], len(found["running"])) == (8, 6, 2)
        assert found["waiting"][0]["request"] < found["waiting"][1]["request"]
        # On several connections, so that each front end has some.
        streams = [stack.enter_context(closing(Watching(server.url))) for _ in range(6)]
        for stream in streams:
            events = stream.events()
            assert next(events)[1]["frame"]["num_running"] == 2
            frame = next(events)[1]["frame"]
            assert frame["generation_tokens_per_s"] > 1
            assert frame["batch_size"]["count"] > 1
            assert frame["end_ns"] - frame["start_ns"] > 0.9e9
    wait_until(lambda: listed()["num_requests"] == 0)


def test_a_report_or_why_there_is_none(server: Server) -> None:
    assert get(server, "/admin/look/report?minutes=1").status == 200


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
