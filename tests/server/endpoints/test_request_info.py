"""Where a request is and where its time went: whom it is told, and what is said where it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventlm.engine.explanations import NotExplainedError, Reason
from eventlm.metrics.rows import RequestRow
from tests.processes import wait_until
from tests.server.auth.test_api_keys import TWO_KEYS, bearer, write
from tests.server.conftest import INVALID, RunningServer, assert_error, capture_logs

ROW = RequestRow(
    request=0,
    index=0,
    replica=1,
    reason="eos",
    arrived_ns=5_000_000,
    finished_ns=25_000_000,
    prompt_tokens=4,
    output_tokens=12,
    cached_tokens=2,
    request_e2e_time=21_000_000,
    request_scheduling_delay=2_000_001,
    request_prefill_time=3_000_000,
    prefill_e2e_time=6_000_001,
    service_class="gold",
    met_deadline=True,
)


def get(server: RunningServer, path: str, key: str = "") -> Any:
    return server.request("GET", f"/v1/requests/{path}", headers=bearer(key) if key else {})


def test_a_request_is_found_by_its_reply_and_by_its_own_id(server: RunningServer) -> None:
    body = {"model": "test", "prompt": ["a", "b"], "n": 2}
    reply = server.post("/v1/completions", body, {"x-request-id": "one/two:three"}).json()
    server.engine.rows.request_ended(ROW)
    for name in (reply["id"], "one/two:three", "one%2Ftwo%3Athree"):
        found = get(server, name).json()
        assert (found["id"], found["object"], found["state"]) == (reply["id"], "eventlm.request", "finished")
        assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
        assert [choice["finish_reason"] for choice in found["choices"]] == ["eos", None, None, None]
        timings = found["choices"][0]["timings"]
        assert found["choices"][1]["timings"] is None
        assert timings == {
            "index": 0, "request": 0, "sample": 0, "replica": 1, "service_class": "gold", "edge_ms": 1.0,
            "queued_ms": 2.000001, "prefill_ms": 3.0, "decode_ms": None, "preempted_ms": None, "num_preemptions": 0,
            "ttft_ms": 6.000001, "tpot_ms": None, "total_ms": 21.0, "cached_tokens": 2, "deadline_met": True,
            "slo_met": None,
        }  # fmt: skip
        explained = get(server, f"{name}/explain").json()
        assert explained["explanations"] == [{"request": 0}, {"request": 1}]
        assert explained["id"] == reply["id"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
def test_the_id_in_a_body_is_the_requests_unless_the_header_has_one(server: RunningServer, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x", "input": "x"}
    body = {"model": "test", "request_id": "of/the body", **prompt}
    refused = server.post(path, body)
    assert_error(refused, 400, INVALID, "request_id", "invalid_value", "1 to 128")
    body["request_id"] = "of/the.body"
    with capture_logs() as logs:
        reply = server.post(path, body)
        # The line comes behind the reply.
        wait_until(lambda: any(line["event"] == "request" for line in logs))
    assert [line["request_id"] for line in logs if line["event"] == "request"] == ["of/the.body"]
    assert reply.headers["x-request-id"] == "of/the.body"
    assert get(server, "of/the.body").json()["id"] == reply.json()["id"]
    both = server.post(path, body, {"x-request-id": "of-the-header"})
    assert both.headers["x-request-id"] == "of-the-header"
    assert get(server, "of-the-header").json()["id"] == both.json()["id"]
    # A header that would not be echoed is none.
    assert server.post(path, body, {"x-request-id": "not sane"}).headers["x-request-id"] == "of/the.body"
    # An error tells it too.
    assert server.post(path, body | {"model": "none"}).headers["x-request-id"] == "of/the.body"


def test_an_id_that_ends_like_a_path_is_distinguished_by_its_quotes(server: RunningServer) -> None:
    reply = server.post("/v1/completions", {"model": "test", "prompt": "x"}, {"x-request-id": "a/explain"}).json()
    assert get(server, "a%2Fexplain").json()["id"] == get(server, "a%2Fexplain/explain").json()["id"] == reply["id"]
    assert_error(get(server, "a/explain"), 404, INVALID, "id", "request_not_found")


def test_it_is_available_as_text_too(server: RunningServer) -> None:
    name = server.chat().json()["id"]
    reply = get(server, f"{name}/explain?format=text")
    assert (reply.headers["content-type"], reply.data) == ("text/plain; charset=utf-8", b"a story")
    assert_error(get(server, f"{name}/explain?format=xml"), 400, INVALID, "format", "invalid_value", "'json'")


@pytest.mark.parametrize("path", ["nobody", "nobody/explain", "chatcmpl-00/explain?format=text"])
def test_an_unknown_id_is_a_404(server: RunningServer, path: str) -> None:
    assert_error(get(server, path), 404, INVALID, "id", "request_not_found")


def test_the_newest_request_of_an_id_has_it(server: RunningServer) -> None:
    for _ in range(2):
        reply = server.post("/v1/completions", {"model": "test", "prompt": "x"}, {"x-request-id": "again"}).json()
    assert get(server, "again").json()["id"] == reply["id"]


def test_a_request_is_of_its_key_alone(start_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    text = TWO_KEYS.replace('scopes = ["admin"]', 'scopes = ["inference", "admin"]')
    server = start_server(api_keys_file=str(write(tmp_path / "keys.toml", text)))
    headers = bearer("sk-alice") | {"x-request-id": "mine"}
    name = server.post("/v1/completions", {"model": "test", "prompt": "x"}, headers).json()["id"]
    for path in (name, "mine", f"{name}/explain", "mine/explain"):
        assert get(server, path, "sk-alice").status == 200
        assert_error(get(server, path, "sk-ops"), 404, INVALID, "id", "request_not_found")
        assert get(server, path).status == 401


REFUSALS: list[tuple[Reason, int, str, str | None]] = [
    ("too_many", 429, "requests", "rate_limit_exceeded"),
    ("too_long", 503, "server_error", "explanation_too_long"),
    ("not_recorded", 409, INVALID, "not_recorded"),
    ("not_kept", 409, INVALID, "not_kept"),
    ("failed", 500, "server_error", None),
]


@pytest.mark.parametrize(("reason", "status", "type_", "code"), REFUSALS)
def test_why_nothing_can_be_explained(
    server: RunningServer, reason: Reason, status: int, type_: str, code: str | None
) -> None:
    name = server.chat().json()["id"]
    server.engine.explain_error = NotExplainedError(reason, "it is so")
    reply = get(server, f"{name}/explain")
    assert_error(reply, status, type_, "id" if status == 409 else None, code)
    assert reply.json()["error"]["message"][0].isupper()
    assert ("retry-after" in reply.headers) == (status in (429, 503))
    assert (reply.json()["error"]["message"] == "It is so.") == (status != 500)
