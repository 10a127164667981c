"""The server of the page: files under a strict policy, the report, commands, and news of a run that goes on."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from eventlm.look.view.server import ViewServer
from eventlm.replay.debugger.session import Session
from eventlm.system.disk import SYSTEM_DISK
from tests.processes import until
from tests.replay.golden import FOLDER

TOKEN = "token"
KNOWN = {"Authorization": f"Bearer {TOKEN}"}
Client = TestClient[web.Request, web.Application]


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    with Session.open(FOLDER / "edf_tight.jsonl") as session:
        async with TestClient(TestServer(ViewServer(session, TOKEN).app), headers=KNOWN) as client:
            yield client


async def test_the_page_is_a_shell_that_runs_its_own_files_only(client: Client) -> None:
    page = await client.get("/")
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    text = await page.text()
    assert "edf" not in text
    for path, kind in (("/view.js", "text/javascript"), ("/view.css", "text/css")):
        file = await client.get(path)
        assert (file.status, file.content_type) == (200, kind)
        assert path in text


async def test_commands_are_those_of_the_debugger(client: Client) -> None:
    async def run(command: str) -> dict[str, object]:
        return await (await client.post("/api/command", json={"command": command})).json()

    moved = await run("goto 50")
    assert moved["position"] == 50
    assert moved["result"]["kind"] == "stop"  # type: ignore[index]
    assert moved["lines"][0].startswith("event 50 at")  # type: ignore[index]
    wrong = await run("find free <")
    assert wrong["error"]["column"] > 5  # type: ignore[index]
    assert wrong["position"] == 50
    assert "did you mean" in (await run("gto 3"))["error"]["message"]  # type: ignore[index]
    response = await client.post("/api/command", data=b"no json")
    assert response.status == 400
    assert (await client.post("/api/command", json={"command": "x" * 5000})).status == 400
    too_long = await client.post("/api/command", data=b"x" * 100_000)
    assert too_long.status == 413
    assert "message" in (await too_long.json())["error"]
    assert (await client.get("/nothing")).status == 404


async def test_the_report_is_that_of_the_run(client: Client) -> None:
    report = await (await client.get("/api/report")).json()
    assert report["isEnded"]
    assert len(report["timeline"]["names"]) > 5
    assert (report["firstNs"], report["lastNs"]) == (0, report["end"])
    news = await (await client.get("/api/news", params={"after": report["nextEvent"]})).json()
    assert news == {"nextEvent": report["nextEvent"], "isEnded": True}
    assert (await client.get("/api/news", params={"after": "x"})).status == 400


async def test_long_work_can_be_cancelled(client: Client) -> None:
    """Without any, nothing happens."""
    assert (await client.post("/api/cancel", json={})).status == 200
    answers = await asyncio.gather(
        client.post("/api/command", json={"command": "goto end"}), client.post("/api/cancel", json={})
    )
    assert [answer.status for answer in answers] == [200, 200]


async def test_news_of_a_run_that_goes_on(tmp_path: Path) -> None:
    source = FOLDER / "edf_tight.jsonl"
    lines = source.read_bytes().splitlines(keepends=True)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(lines[:100]))
    # A lock says that the run is still being written.
    writer = SYSTEM_DISK.append(path)
    try:
        with Session.open(path) as session:
            async with TestClient(TestServer(ViewServer(session, TOKEN).app), headers=KNOWN) as client:
                report = await (await client.get("/api/report")).json()
                assert (report["nextEvent"], report["isEnded"]) == (100, False)
                asked = asyncio.ensure_future(client.get("/api/news", params={"after": 100}))
                await asyncio.sleep(0.1)
                writer.write(b"".join(lines[100:120]))
                news = await (await asked).json()
                assert news["nextEvent"] == 120
                assert (await (await client.get("/api/report")).json())["nextEvent"] == 120
    finally:
        writer.close()
    shutil.rmtree(tmp_path)


async def test_a_run_that_diverges_while_it_is_followed_says_so_and_goes_no_further(tmp_path: Path) -> None:
    lines = (FOLDER / "broken_block.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(lines[:60]))
    writer = SYSTEM_DISK.append(path)
    try:
        with Session.open(path) as session:
            async with TestClient(TestServer(ViewServer(session, TOKEN).app), headers=KNOWN) as client:
                writer.write(b"".join(lines[60:150]))
                for _ in range(2):
                    news = await client.get("/api/news", params={"after": 60})
                    assert news.status == 409
                    assert "diverges from its replay" in (await news.json())["error"]["message"]
                answer = await (await client.post("/api/command", json={"command": "goto 30"})).json()
                assert answer["position"] == 30
    finally:
        writer.close()


async def test_a_trace_that_was_cut_is_an_error_not_a_wait(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes((FOLDER / "edf_tight.jsonl").read_bytes())
    with Session.open(path) as session:
        async with TestClient(TestServer(ViewServer(session, TOKEN).app), headers=KNOWN) as client:
            path.write_bytes(path.read_bytes()[:8000])
            answer = await (await client.post("/api/command", json={"command": "goto end"})).json()
    assert "error" in answer


async def test_a_command_is_cancelled_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with Session.open(FOLDER / "edf_tight.jsonl") as session:
        server = ViewServer(session, TOKEN)
        async with TestClient(TestServer(server.app), headers=KNOWN) as client:
            go_on = threading.Event()
            blocked = asyncio.ensure_future(server._in_thread(go_on.wait))
            command = asyncio.ensure_future(client.post("/api/command", json={"command": "goto end"}))
            await until(lambda: server._num_sent)
            await client.post("/api/cancel", json={})
            go_on.set()
            await blocked
            answer = await (await command).json()
    assert answer["error"] == {"message": "cancelled", "isInterrupted": True}
    assert answer["position"] == 0
