"""What the dashboard reads: who may, what it gets, how a stream ends, and that a report says why there is none."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from eventlm.engine.oldest_requests import ListedSequence, Wait
from eventlm.engine.reports import NoReportError, Reason
from eventlm.engine.request import EngineUnavailableError
from eventlm.server.dashboard.endpoints import FEED
from tests.processes import wait_until
from tests.server.auth.test_api_keys import TWO_KEYS, bearer, write
from tests.server.conftest import INVALID, RunningServer, assert_error
from tests.server.dashboard.watching import Watching
from tests.server.endpoints.test_metrics import feed

OPS = bearer("sk-ops")
PATHS = ["/admin/look/live", "/admin/look/requests", "/admin/look/report"]
LISTED = ListedSequence(
    request=17,
    index=0,
    state="waiting",
    age_ns=5,
    service_class="<b>gold</b>",
    priority=0,
    replica=-1,
    prompt_tokens=9,
    output_tokens=0,
    num_blocks=0,
    num_restarts=0,
    wait=Wait(cause="blocks", replica=1, num_lacking=3, other=(4, 0)),
)


def num_watchers(server: RunningServer) -> int:
    return server._server._runner.app[FEED].num_watchers


def quicken(server: RunningServer, seconds: float = 0.01) -> None:
    server._server._runner.app[FEED]._interval_seconds = seconds


def test_who_may(guarded: RunningServer) -> None:
    for path in PATHS:
        for headers, status in [({}, 401), (bearer("sk-no"), 401), (bearer("sk-alice"), 403)]:
            assert guarded.request("GET", path, headers=headers).status == status
        assert_error(guarded.request("POST", path, headers=OPS), 405, INVALID, None, "method_not_supported")
    assert num_watchers(guarded) == 0


@pytest.mark.parametrize("path", PATHS)
def test_without_an_admin_key_it_says_how_to_set_one_up(server: RunningServer, path: str) -> None:
    refused = server.request("GET", path)
    assert_error(refused, 401, INVALID, None, None, message="--api-keys-file FILE")


def test_frames_come_until_the_watcher_leaves(guarded: RunningServer) -> None:
    feed(guarded)
    quicken(guarded)
    stream = Watching(guarded.url)
    found = [event for _, (name, event) in zip(range(3), stream.events(), strict=False) if name == "message"]
    assert [each["number"] for each in found] == [1, 2, 3]
    first, second, _ = (each["frame"] for each in found)
    assert first["generation_tokens_per_s"] is None
    assert second["generation_tokens_per_s"] == 0
    assert len(first["replicas"]) == 2
    assert first["num_blocks"] == 2 * guarded.engine.store.snapshot().num_blocks
    assert num_watchers(guarded) == 1
    stream.close()
    wait_until(lambda: num_watchers(guarded) == 0)


def test_of_a_slow_watcher_frames_are_left_out_and_no_other_waits(guarded: RunningServer) -> None:
    feed(guarded)
    quicken(guarded, 0.001)
    slow, fast = Watching(guarded.url, receive_bytes=2048), Watching(guarded.url)
    latest = 0
    for _, event in fast.events():
        latest = event["number"]
        if latest > 400:
            break
    numbers = []
    for _, event in slow.events():
        numbers.append(event["number"])
        if event["number"] >= latest:
            break
    # What the two kernels held came first, and then nothing older than what is new now.
    assert len(numbers) < latest / 2
    assert numbers == sorted(set(numbers))
    slow.close()
    fast.close()
    wait_until(lambda: num_watchers(guarded) == 0)


def test_it_ends_with_the_server(guarded: RunningServer) -> None:
    stream = Watching(guarded.url)
    events = stream.events()
    assert next(events)[1]["number"] == 1
    began = time.monotonic()
    guarded.stop()
    assert list(events) == []
    # In order: nobody had to be cut off.
    assert time.monotonic() - began < 0.9


def test_it_ends_when_the_key_is_taken_away(guarded: RunningServer, tmp_path: Path) -> None:
    quicken(guarded)
    stream = Watching(guarded.url)
    events = stream.events()
    next(events)
    write(tmp_path / "keys.toml", TWO_KEYS.replace('["admin"]', '["inference"]'))
    guarded.loop.call_soon_threadsafe(guarded.context.reload)
    assert all(name == "message" for name, _ in events)
    assert guarded.request("GET", PATHS[1], headers=OPS).status == 403
    assert num_watchers(guarded) == 0


def test_an_engine_that_goes_away(guarded: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(guarded)
    stream = Watching(guarded.url)
    events = stream.events()
    next(events)

    async def read_metrics() -> None:
        raise EngineUnavailableError("the engine's process has died")

    monkeypatch.setattr(guarded.engine, "read_metrics", read_metrics)
    name, error = list(events)[-1]
    assert (name, error["error"]["type"]) == ("error", "server_error")
    assert_error(guarded.request("GET", PATHS[0], headers=OPS), 503, "server_error", message="has died")


def test_the_oldest_requests(guarded: RunningServer) -> None:
    guarded.engine.waiting = [LISTED] * 3
    found = guarded.request("GET", "/admin/look/requests?limit=2", headers=OPS).json()
    assert len(found["waiting"]) == 2
    assert found["waiting"][0]["wait"] == {
        "cause": "blocks",
        "replica": 1,
        "num_lacking": 3,
        "other": [4, 0],
        "remaining_ns": 0,
    }
    assert (found["policy"], found["num_waiting"]) == ("fcfs", 3)
    guarded.request("GET", "/admin/look/requests", headers=OPS)
    assert guarded.engine.limits == [2, 20]
    for limit in ("0", "201", "x"):
        refused = guarded.request("GET", f"/admin/look/requests?limit={limit}", headers=OPS)
        assert_error(refused, 400, INVALID, "limit", "invalid_type" if limit == "x" else "invalid_value")


def test_a_report_is_a_file_to_keep(guarded: RunningServer) -> None:
    reply = guarded.request("GET", "/admin/look/report?minutes=3", headers=OPS)
    assert (reply.status, reply.data) == (200, b"<p>180 s</p>")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["content-disposition"].startswith("attachment")
    assert reply.headers["x-content-type-options"] == "nosniff"
    for minutes in ("0", "1441"):
        refused = guarded.request("GET", f"/admin/look/report?minutes={minutes}", headers=OPS)
        assert_error(refused, 400, INVALID, "minutes", "invalid_value")


REFUSALS: list[tuple[Reason, int, str, str]] = [
    ("busy", 429, "requests", "rate_limit_exceeded"),
    ("too_long", 503, "server_error", "report_too_long"),
    ("not_recorded", 409, INVALID, "not_recorded"),
    ("failed", 500, "server_error", "report_failed"),
]


@pytest.mark.parametrize(("reason", "status", "type_", "code"), REFUSALS)
def test_why_there_is_no_report(guarded: RunningServer, reason: Reason, status: int, type_: str, code: str) -> None:
    guarded.engine.report_error = NoReportError(reason, "it is so")
    reply = guarded.request("GET", "/admin/look/report", headers=OPS)
    assert_error(reply, status, type_, None, code)
    assert ("retry-after" in reply.headers) == (status in (429, 503))
    assert reply.json()["error"]["message"] == "It is so."
