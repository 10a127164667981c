"""The server of the page: files under a strict policy, the report, commands, and news of a run that goes on."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from eventlm.look.view.server import ViewServer
from eventlm.replay.debugger.session import Session
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
    assert (await client.post("/api/command", data=b"x" * 100_000)).status == 413


async def test_the_report_is_that_of_the_run(client: Client) -> None:
    report = await (await client.get("/api/report")).json()
    assert report["isEnded"]
    assert len(report["timeline"]["names"]) > 5
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
    from eventlm.system.disk import SYSTEM_DISK

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
