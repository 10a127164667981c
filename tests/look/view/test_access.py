"""Only who names this machine gets the page, and only who knows the token gets the run."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from eventlm.look.view.access import guard, new_token

TOKEN = new_token()


@pytest.fixture
async def client() -> TestClient[web.Request, web.Application]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="the run")

    app = web.Application(middlewares=[guard(TOKEN)])
    app.add_routes([web.get("/", answer), web.get("/api/report", answer), web.post("/api/command", answer)])
    async with TestClient(TestServer(app)) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {}, 200),
        ("/", {"Host": "localhost:1"}, 200),
        ("/", {"Host": "attacker.example"}, 403),
        ("/", {"Host": "127.0.0.1.attacker.example:80"}, 403),
        ("/api/report", {}, 401),
        ("/api/report", {"Authorization": "Bearer x"}, 401),
        ("/api/report", {"Authorization": "Bearer \udcff"}, 401),
        ("/api/report", {"Authorization": f"Bearer {TOKEN}"}, 200),
        ("/api/report", {"Authorization": f"Bearer {TOKEN}", "Host": "attacker.example"}, 403),
        ("/api/report", {"Authorization": f"Bearer {TOKEN}", "Origin": "http://attacker.example"}, 403),
        ("/api/report", {"Authorization": f"Bearer {TOKEN}", "Origin": "null"}, 403),
    ],
)
async def test_who_is_answered(
    client: TestClient[web.Request, web.Application], path: str, headers: dict[str, str], status: int
) -> None:
    response = await client.get(path, headers=headers)
    assert response.status == status
    if status >= 400:
        assert "message" in (await response.json())["error"]


def test_tokens_differ() -> None:
    assert new_token() != new_token()
    assert len(new_token()) >= 32
