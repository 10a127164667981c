"""Which class a request has, by its key, a header or its tier, and what the class gives it."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import openai
import pytest

from eventlm.config import ServiceClass
from eventlm.engine.request import Request
from eventlm.server.scheduling import check_key_classes
from tests.server.auth.test_api_keys import bearer, write
from tests.server.conftest import INVALID, RunningServer, assert_error

CLASSES = {
    "gold": ServiceClass(priority=-10, deadline_ms=500, slo_tpot_ms=40, drop_if_late=True),
    "bronze": ServiceClass(priority=10, slo_ttft_ms=900),
}
KEYS = """
[[keys]]
name = "alice"
key = "sk-alice"
service_class = "gold"

[[keys]]
name = "bob"
key = "sk-bob"
service_class = "bronze"

[[keys]]
name = "carol"
key = "sk-carol"

[[keys]]
name = "dave"
key = "sk-dave"
service_class = "golden"
"""
MESSAGES: Any = [{"role": "user", "content": "hi"}]
StartServer = Callable[..., RunningServer]


@pytest.fixture
def open_server(start_server: StartServer) -> RunningServer:
    return start_server(classes=CLASSES)


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    return str(write(tmp_path / "keys.toml", KEYS))


def given(request: Request) -> tuple[object, ...]:
    return (
        request.scheduling.service_class,
        request.scheduling.priority,
        request.scheduling.deadline_ns // 10**6,
        request.scheduling.slo_ttft_ns // 10**6,
        request.scheduling.slo_tpot_ns // 10**6,
        request.scheduling.drop_if_late,
    )


def test_a_header_or_a_tier_names_the_class(open_server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{open_server.url}/v1", api_key="none", max_retries=0)
    chat = client.chat.completions.create(
        model="test", messages=MESSAGES, extra_headers={"x-eventlm-class": "gold"}, service_tier="flex"
    )
    completion = client.completions.create(model="test", prompt="x", extra_body={"service_tier": "bronze"})
    fields = {"service_tier": "gold", "priority": 3, "drop_if_late": False}
    embedding = client.embeddings.create(model="test", input="x", extra_body=fields)
    assert [given(request) for request in open_server.engine.requests] == [
        ("gold", -10, 500, 0, 40, True),
        ("bronze", 10, 0, 900, 0, False),
        ("gold", 3, 500, 0, 40, False),
    ]
    assert embedding.to_dict()["service_tier"] == "gold"
    assert chat.service_tier == "gold"
    assert completion.to_dict()["service_tier"] == "bronze"


def test_a_request_s_own_values_override_those_of_its_class(open_server: RunningServer) -> None:
    fields = {"priority": -99, "deadline_ms": 7, "slo": {"ttft_ms": 5}, "drop_if_late": False}
    client = openai.OpenAI(base_url=f"{open_server.url}/v1", api_key="none", max_retries=0)
    client.completions.create(model="test", prompt="x", extra_body=fields, extra_headers={"x-eventlm-class": "gold"})
    assert given(open_server.engine.requests[0]) == ("gold", -99, 7, 5, 40, False)


def test_every_chunk_of_a_stream_has_the_class(open_server: RunningServer) -> None:
    for path, body in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "x"})):
        reply = open_server.post(f"/v1/{path}", {"model": "test", "service_tier": "gold", "stream": True, **body})
        assert {chunk["service_tier"] for chunk in reply.events()[:-1]} == {"gold"}


@pytest.mark.parametrize("tier", ["auto", "default", "flex", "scale", "priority"])
def test_tiers_that_are_no_class_ask_for_nothing(open_server: RunningServer, tier: str) -> None:
    assert open_server.chat(service_tier=tier).json()["service_tier"] == "default"
    assert given(open_server.engine.requests[0]) == ("", 0, 0, 0, 0, False)


def test_without_a_tier_or_a_class_there_is_no_field(open_server: RunningServer) -> None:
    assert "service_tier" not in open_server.chat().json()


def test_the_default_class_is_for_requests_that_name_none(start_server: StartServer) -> None:
    server = start_server(classes=CLASSES | {"default": ServiceClass(priority=5)})
    assert server.chat().json()["service_tier"] == "default"
    assert server.chat(service_tier="auto").json()["service_tier"] == "default"
    assert [given(request)[:2] for request in server.engine.requests] == [("default", 5)] * 2


def test_a_class_that_does_not_exist_is_an_error(open_server: RunningServer) -> None:
    known = "known are 'gold', 'bronze'"
    reply = open_server.post("/v1/completions", {"model": "test", "prompt": "x"}, {"x-eventlm-class": "golf"})
    assert_error(reply, 400, INVALID, "x-eventlm-class", "invalid_value", known)
    for stream in (False, True):
        reply = open_server.complete(service_tier="golf", stream=stream)
        assert_error(reply, 400, INVALID, "service_tier", "invalid_value", f"{known}, 'auto', 'default', 'flex'")
    assert not open_server.engine.requests


def test_to_be_dropped_one_must_be_late_for_something(open_server: RunningServer) -> None:
    assert_error(open_server.chat(drop_if_late=True), 400, INVALID, "drop_if_late", "invalid_value", "deadline_ms")
    assert_error(open_server.chat(drop_if_late=True, slo={"tpot_ms": 5}), 400, INVALID, "drop_if_late", "invalid_value")
    assert open_server.chat(drop_if_late=True, slo={"ttft_ms": 5}).status == 200


def complete(server: RunningServer, key: str, class_: str = "", **fields: Any) -> Any:
    headers = bearer(key) | ({"x-eventlm-class": class_} if class_ else {})
    return server.post("/v1/completions", {"model": "test", "prompt": "x", **fields}, headers)


def test_a_key_has_its_class_and_no_other(start_server: StartServer, keys_file: str) -> None:
    server = start_server(classes=CLASSES, api_keys_file=keys_file)
    assert complete(server, "sk-alice").json()["service_tier"] == "gold"
    assert complete(server, "sk-alice", "gold").json()["service_tier"] == "gold"
    # A tier is a wish; what became of it is in the reply.
    assert complete(server, "sk-bob", service_tier="gold").json()["service_tier"] == "bronze"
    assert complete(server, "sk-carol", service_tier="gold").json()["service_tier"] == "default"
    assert [request.scheduling.service_class for request in server.engine.requests] == ["gold", "gold", "bronze", ""]
    for key in ("sk-bob", "sk-carol", "sk-dave"):
        reply = complete(server, key, "gold")
        assert_error(reply, 403, INVALID, "x-eventlm-class", "service_class_not_allowed", "'gold'")


def test_a_key_does_not_get_before_its_class_by_a_priority(start_server: StartServer, keys_file: str) -> None:
    server = start_server(classes=CLASSES, api_keys_file=keys_file)
    reply = complete(server, "sk-bob", priority=9)
    assert_error(reply, 403, INVALID, "priority", "service_class_not_allowed", "priority 10 at best")
    assert_error(complete(server, "sk-carol", priority=-1), 403, INVALID, "priority", "service_class_not_allowed")
    assert complete(server, "sk-bob", priority=11).status == 200
    assert server.engine.requests[0].scheduling.priority == 11


def test_keys_leave_the_choice_where_the_configuration_does(start_server: StartServer, keys_file: str) -> None:
    server = start_server(classes=CLASSES, api_keys_file=keys_file, requests_choose_class="always")
    assert complete(server, "sk-bob", "gold").json()["service_tier"] == "gold"
    assert complete(server, "sk-bob").json()["service_tier"] == "bronze"
    assert complete(server, "sk-bob", priority=-20).status == 200


def test_the_configuration_can_forbid_the_choice_of_a_class(start_server: StartServer) -> None:
    server = start_server(classes=CLASSES | {"default": ServiceClass(priority=5)}, requests_choose_class="never")
    reply = server.complete(priority=4)
    assert_error(reply, 403, INVALID, "priority", "service_class_not_allowed", "priority 5 at best")
    reply = server.post("/v1/completions", {"model": "test", "prompt": "x"}, {"x-eventlm-class": "gold"})
    assert_error(reply, 403, INVALID, "x-eventlm-class", "service_class_not_allowed", "'gold'")
    assert server.complete(service_tier="gold", priority=6).json()["service_tier"] == "default"
    assert [request.scheduling.priority for request in server.engine.requests] == [6]


def test_a_key_whose_class_is_not_configured_is_reported(start_server: StartServer, keys_file: str) -> None:
    server = start_server(classes=CLASSES, api_keys_file=keys_file)
    (warning,) = check_key_classes(server.context)
    assert "'golden', which is not configured (did you mean gold?)" in warning
    assert "service_tier" not in complete(server, "sk-dave").json()


def test_a_session_has_a_number_that_does_not_tell_its_name(start_server: StartServer, keys_file: str) -> None:
    server = start_server(api_keys_file=keys_file, classes=CLASSES)

    def session(key: str = "sk-carol", header: str = "", **fields: Any) -> int:
        headers = bearer(key) | ({"x-session-id": header} if header else {})
        assert server.post("/v1/completions", {"model": "test", "prompt": "x", **fields}, headers).status == 200
        return server.engine.requests[-1].scheduling.session

    named = session(header="a")
    assert 0 < named < 2**53
    assert named == session(session_id="a") == session(prompt_cache_key="a")
    assert named == session(header="a", session_id="b", prompt_cache_key="c")
    assert session(session_id="b", prompt_cache_key="a") == session(header="b") != named
    assert session(session_id=7) == session(header="7")
    # Another owner's is another one, and so is that of another server.
    assert session("sk-dave", "a") != named
    assert session() == session(session_id="", prompt_cache_key="") == 0
    number = int.from_bytes(blake2b(b"carol\0a", digest_size=8).digest()) >> 11
    assert named != number
