"""Which model answers: the one asked for, its canary, its fallback; and what a shadow gets."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from eventlm.config import Config, ServiceClass
from eventlm.config.model_rules import ModelRules
from eventlm.engine.request import Submission
from eventlm.scheduling_params import LOWEST_PRIORITY
from tests.http_exchange import Reply
from tests.processes import wait_until
from tests.server.conftest import RunningServer

OTHER = "org/test"


@pytest.fixture
def ruled(start_server: Callable[..., RunningServer]) -> Callable[..., RunningServer]:
    def start(**rules: Any) -> RunningServer:
        server = start_server(classes={"gold": ServiceClass(priority=-1)})
        server.context.whole_config = Config(models={"test": ModelRules(**rules)})
        return server

    return start


def ask(server: RunningServer, session: str = "", service_class: str = "", **fields: Any) -> Reply:
    named = {"x-session-id": session, "x-eventlm-class": service_class}
    headers = {name: value for name, value in named.items() if value}
    reply = server.post("/v1/completions", {"model": "test", "prompt": "x", "max_tokens": 3, **fields}, headers)
    assert reply.status == 200
    return reply


def routes(server: RunningServer) -> list[tuple[str, str, str]]:
    found = [request.scheduling for request in server.engine.requests]
    return [(each.model, each.asked_model, each.route) for each in found]


def test_a_model_that_is_busy_gives_way_to_its_fallback(ruled: Callable[..., RunningServer]) -> None:
    server = ruled(fallback=OTHER)
    assert "x-eventlm-model" not in ask(server).headers
    server.engine.busy = {"test"}
    reply = ask(server)
    assert (reply.json()["model"], reply.headers["x-eventlm-model"]) == ("test", OTHER)
    stream = ask(server, stream=True)
    assert {chunk["model"] for chunk in stream.events()[:-1]} == {"test"}
    assert stream.headers["x-eventlm-model"] == OTHER
    # Who asks for the other one gets that.
    assert "x-eventlm-model" not in ask(server, model=OTHER).headers
    routed = (OTHER, "test", "fallback")
    assert routes(server) == [("test", "", ""), routed, routed, (OTHER, "", "")]


def test_only_requests_of_a_class_fall_back(ruled: Callable[..., RunningServer]) -> None:
    server = ruled(fallback=OTHER, fallback_class="gold", fallback_after_ms=7)
    server.engine.busy = {"test"}
    ask(server)
    ask(server, service_class="gold")
    assert [route for _, _, route in routes(server)] == ["", "fallback"]


def test_a_canary_gets_its_share_and_keeps_its_sessions(ruled: Callable[..., RunningServer]) -> None:
    server = ruled(canary=OTHER, canary_percent=30)
    answered = [ask(server, f"s{number}").headers.get("x-eventlm-model", "") for number in range(80)]
    assert 10 < answered.count(OTHER) < 40
    assert answered[:20] == [ask(server, f"s{number}").headers.get("x-eventlm-model", "") for number in range(20)]
    assert {route for _, _, route in routes(server)} == {"", "canary"}
    server.engine.busy = {OTHER}
    assert "x-eventlm-model" not in ask(server, f"s{answered.index(OTHER)}").headers


def test_a_shadow_gets_a_copy_after_everything_else(ruled: Callable[..., RunningServer]) -> None:
    server = ruled(shadow=OTHER, shadow_percent=100)
    reply = ask(server, service_class="gold", deadline_ms=100_000, stop="never")
    assert "x-eventlm-model" not in reply.headers
    wait_until(lambda: len(server.engine.requests) == 2)
    first, shadow = server.engine.requests
    assert routes(server) == [("test", "", ""), (OTHER, "test", "shadow")]
    assert shadow.prompt_token_ids == first.prompt_token_ids
    assert (first.scheduling.priority, first.scheduling.deadline_ns) == (-1, 10**11)
    assert (shadow.scheduling.priority, shadow.scheduling.deadline_ns) == (LOWEST_PRIORITY, 0)
    # It is read to its end, and its text is looked at, because its stop string must be.
    wait_until(lambda: any(request == 1 for request, *_ in server.engine.text_ends))


def test_no_shadow_waits_for_a_model_that_is_down_and_there_are_not_too_many(
    ruled: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ruled(shadow=OTHER, shadow_percent=100)
    server.engine.busy = {OTHER}
    with capture_logs() as logs:
        ask(server)
        wait_until(lambda: any(each["event"] == "a shadow was not answered" for each in logs))
    monkeypatch.setattr("eventlm.server.context.MAX_SHADOWS", 0)
    server.engine.busy = set()
    ask(server)
    assert routes(server) == [("test", "", "")] * 2


def test_what_the_shadow_cannot_do_harms_nobody(ruled: Callable[..., RunningServer]) -> None:
    server = ruled(shadow=OTHER, shadow_percent=100)
    server.context.engine.model_names.remove(OTHER)
    assert ask(server).json()["choices"]


def test_responses_fall_back_too_in_the_background_as_well(ruled: Callable[..., RunningServer]) -> None:
    server = ruled(fallback=OTHER, shadow=OTHER, shadow_percent=100)
    server.engine.busy = {"test"}
    for fields in ({}, {"background": True}):
        reply = server.post("/v1/responses", {"model": "test", "input": "x", "max_output_tokens": 3, **fields})
        assert (reply.status, reply.json()["model"], reply.headers["x-eventlm-model"]) == (200, "test", OTHER)
    # A copy of a conversation's turn would be another turn of it.
    assert routes(server) == [(OTHER, "test", "fallback")] * 2


def test_a_stream_of_a_fallback_is_resumed_under_the_name_that_was_asked_for(
    start_server: Callable[..., RunningServer],
) -> None:
    server = start_server(resume_seconds=60)
    server.context.whole_config = Config(models={"test": ModelRules(fallback=OTHER)})
    server.engine.busy = {"test"}
    stream = server.post("/v1/completions", {"model": "test", "prompt": "x", "max_tokens": 3, "stream": True})
    [reply_id] = set(re.findall(rb'"id":"(cmpl-\w+)"', stream.data))
    again = server.request("GET", f"/v1/stream/{reply_id.decode()}?from=0")
    assert set(re.findall(rb'"model":"([^"]+)"', again.data)) == {b"test"}


def test_ollama_s_tag_is_no_part_of_a_name(ruled: Callable[..., RunningServer]) -> None:
    server = ruled(fallback=OTHER)
    server.engine.busy = {"test"}
    reply = server.post("/api/generate", {"model": "test:latest", "prompt": "x", "stream": False})
    assert (reply.json()["model"], reply.headers["x-eventlm-model"]) == ("test:latest", OTHER)


def test_by_default_no_model_gives_way() -> None:
    assert Submission(reply_id="r").gives_way_ns == -1
