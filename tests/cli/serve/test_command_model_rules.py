"""Models that answer for others, and sessions that stay, by a real server before stand-ins for others."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

from eventlm.errors import ExitCode
from eventlm.events import Arrived, Finished
from eventlm.scheduling_params import LOWEST_PRIORITY
from tests.cli.conftest import RunHere, StartServer
from tests.gateway.stub_backend import StubBackend, chat_prompt, reply_text
from tests.processes import until
from tests.server.auth.test_api_keys import bearer

MESSAGES: Any = [{"role": "user", "content": "hi"}]
HEADER = "x-eventlm-model"
#: All blocks are looked at after every event of the trace.
SMALL_CACHE = 4096
KEYS = """
[[keys]]
name = "all"
sha256 = "a046e4925c1c5162e2a952bf81b903655ab1b77d52aac4b82b9c4ca26ad5f73e"
scopes = ["inference", "admin"]
"""


async def test_own_workers_answer_for_backends_that_are_gone_and_those_shadow_them(
    start_server: StartServer,
) -> None:
    async with StubBackend("vllm") as stub:
        server = await asyncio.to_thread(
            start_server,
            *("fake", "--replicaset", f"b:backend={stub.url},served_model_name=other,max_failures=1"),
            *("--backend-cache-tokens", str(SMALL_CACHE), "--num-blocks", "600"),
            *("--model-rules", "other:fallback=fake", "--model-rules", "fake:shadow=other,shadow_percent=100"),
            *("--api-servers", "1", "--probe-interval-ms", "20"),
        )
        client = server.async_client().chat.completions.with_raw_response

        async def ask(model: str) -> tuple[str, str, str]:
            raw = await client.create(model=model, messages=MESSAGES, seed=3, max_tokens=4)
            reply = raw.parse()
            return reply.model, raw.headers.get(HEADER, ""), reply.choices[0].message.content or ""

        there = ("other", "", reply_text(chat_prompt(MESSAGES), 3, 4))
        assert await ask("other") == there
        assert (await ask("fake"))[:2] == ("fake", "")
        await until(lambda: stub.num_completed == 2)
        await stub.stop()
        await until(lambda: '"backend is down"' in server.stderr)
        assert (await ask("other"))[:2] == ("other", "fake")
        await stub.start()
        await until(lambda: server.stderr.count('"backend is up"') == 2)
        assert await ask("other") == there
        trace = await asyncio.to_thread(server.stop_and_verify)
    routed = [(each.scheduling.model, each.scheduling.asked_model, each.scheduling.route) for each in trace.of(Arrived)]
    shadow = ("other", "fake", "shadow")
    assert routed == [("other", "", ""), ("fake", "", ""), shadow, ("fake", "other", "fallback"), ("other", "", "")]
    assert [each.replicaset for each in trace.of(Arrived)] == [1, 0, 1, 0, 1]
    copy = trace.of(Arrived)[2]
    assert copy.scheduling.priority == LOWEST_PRIORITY
    [end] = [each for each in trace.of(Finished) if each.request == copy.s]
    assert (end.reason, end.position) == ("length", 4)


async def test_sessions_stay_with_their_backends_while_those_come_and_go(start_server: StartServer) -> None:
    async with StubBackend("vllm") as first, StubBackend("vllm", key="s3cr3t") as second:
        server = await asyncio.to_thread(
            start_server,
            *("--backend", first.url, "--router", "session_affinity", "--api-keys-file", "keys.toml"),
            *("--backend-cache-tokens", str(SMALL_CACHE)),
            files={"keys.toml": KEYS},
        )
        client = server.async_client(api_key="sk-all")

        async def homes() -> dict[str, int]:
            found = {}
            for session in map(str, range(8)):
                before = len(first.requests)
                headers = {"x-session-id": session}
                await client.chat.completions.create(model="stub", messages=MESSAGES, extra_headers=headers)
                found[session] = 0 if len(first.requests) > before else 1
            return found

        def administer(method: str, path: str = "", backend: str = "") -> list[dict[str, Any]]:
            body = json.dumps({"backend": backend}).encode() if backend else None
            headers = bearer("sk-all") | {"Content-Type": "application/json"}
            reply = server.request(method, f"/admin/backends{path}", body, headers)
            assert reply.status == 200, reply
            found: list[dict[str, Any]] = reply.json()["backends"]
            return found

        added = await asyncio.to_thread(administer, "POST", "", f"{second.url},key=s3cr3t")
        assert [(each["state"], each["problem"]) for each in added] == [("up", ""), ("up", "")]
        both = await homes()
        assert set(both.values()) == {0, 1}
        name = second.url.removeprefix("http://")
        drained = await asyncio.to_thread(administer, "POST", f"/{name}/drain")
        assert [each["state"] for each in drained] == ["up", "drained"]
        assert set((await homes()).values()) == {0}
        await asyncio.to_thread(administer, "POST", f"/{name}/resume")
        assert await homes() == both
        await asyncio.to_thread(administer, "DELETE", f"/{name}")
        assert set((await homes()).values()) == {0}
        assert len(await asyncio.to_thread(administer, "GET")) == 1
        trace = await asyncio.to_thread(server.stop_and_verify)
    sessions = Counter(each.scheduling.session for each in trace.of(Arrived))
    assert sorted(sessions.values()) == [4] * 8
    assert "s3cr3t" not in server.stderr + server.trace.read_text()


def test_a_rule_for_a_model_that_is_not_there(run_here: RunHere) -> None:
    code, _, errors = run_here("serve", "--port", "0", "fake", "--no-record", "--model-rules", "fake:fallback=big")
    assert (code, errors.count("\n")) == (ExitCode.USAGE, 1), errors
    assert "[models.fake]: fallback = 'big': this server has no such model; it has fake" in errors
