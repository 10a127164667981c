"""Service classes, deadlines, timings and explanations of a real server, against what its trace says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from eventlm.events import Arrived, Event, Launched, TimerDue
from eventlm.metrics.rows import RelayedTokens, RequestRow, StepRow
from eventlm.metrics.store import MetricsStore
from eventlm.replay.explain.explainer import explain
from eventlm.replay.what_if.null_test import null_test
from eventlm.replay.workload.recorded_run import read_run
from tests.cli.conftest import StartServer
from tests.cli.streams import Stream, going_on
from tests.processes import wait_until
from tests.serving import Server, Trace, verified

CLASSES = """
[classes.gold]
priority = -10
deadline_ms = 60000
slo_ttft_ms = 60000
slo_tpot_ms = 60000

[classes.bronze]
priority = 10
slo_ttft_ms = 1
slo_tpot_ms = 100000

[classes.hasty]
deadline_ms = 1
drop_if_late = true
"""
#: One sequence at a time, so that the others wait; steps of 2 ms; 5 ms for any prompt, as far as is predicted.
FLAGS = (
    *("--model", "fake", "--config", "eventlm.toml", "--max-num-seqs", "1", "--max-steps-in-flight", "1"),
    *("--predictor", "5000000000,0,0,0,0", "--no-prefix-cache"),
)
TIMED = {"eventlm": {"timings": True}}
NAMES = {
    "edge_ms": "edge_ns",
    "queued_ms": "request_scheduling_delay",
    "prefill_ms": "request_prefill_time",
    "decode_ms": "request_decode_time",
    "preempted_ms": "request_preemption_time",
    "ttft_ms": "prefill_e2e_time",
    "tpot_ms": "request_time_per_output_token",
    "total_ms": "request_e2e_time",
}


class Rows:
    """A sink of the metrics store that keeps all rows of requests."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.by_identity: dict[tuple[int, int], RequestRow] = {}
        store = MetricsStore(sink=self)
        for event in events:
            store.apply(event)

    def request_ended(self, row: RequestRow) -> None:
        self.by_identity[row.request, row.index] = row

    def step_completed(self, row: StepRow) -> None:
        """Not wanted."""

    def tokens_relayed(self, row: RelayedTokens) -> None:
        """Nor these."""


@pytest.fixture
def server(start_server: StartServer) -> Server:
    return start_server(*FLAGS, files={"eventlm.toml": CLASSES})


def check_timings(trace: Trace, path: Path, replies: Sequence[Any]) -> None:
    """What replies said of their times is what the metrics store and `eventlm explain` find in the log."""
    rows = Rows(trace.events).by_identity
    all_told = [told for reply in replies for told in reply["timings"]]
    explained = explain(path, [(told["request"], told["sample"]) for told in all_told]).explanations
    for told, found in zip(all_told, explained, strict=True):
        row = rows[told["request"], told["sample"]]
        for name, field in NAMES.items():
            ns = getattr(row, field)
            assert told[name] == (None if ns is None else ns / 1e6), name
        assert (told["replica"], told["cached_tokens"]) == (row.replica, row.cached_tokens)
        assert (told["num_preemptions"], told["service_class"]) == (row.request_num_preemptions, row.service_class)
        assert (told["deadline_met"], told["slo_met"]) == (row.met_deadline, row.met_slo)
        assert found.first_token_ns is not None
        assert found.total_ns / 1e6 == told["total_ms"]
        assert (found.first_token_ns - found.start_ns) / 1e6 == told["ttft_ms"]


async def one(client: openai.AsyncOpenAI, class_: str, *, stream: bool, **fields: Any) -> Any:
    """`eventlm` of a reply."""
    body = {"model": "fake", "extra_headers": {"x-eventlm-class": class_}, "extra_body": TIMED, **fields}
    if not stream:
        reply = await client.completions.create(prompt=f"of {class_}", max_tokens=20, **body)
        assert reply.to_dict()["service_tier"] == class_
        return reply.to_dict()["eventlm"]
    messages: Any = [{"role": "user", "content": "hi"}]
    chunks = await client.chat.completions.create(messages=messages, max_completion_tokens=20, stream=True, **body)
    return [chunk async for chunk in chunks][-1].to_dict()["eventlm"]


async def crowd(server: Server) -> list[Any]:
    """Behind one that has the only place ten of bronze, and when they are all in line two of gold, of which one is a
    stream with two choices."""
    options: Any = {"include_usage": True}

    async def until_in_line(class_: str, number: int) -> None:
        name = f'eventlm:class_requests_total{{service_class="{class_}"}} {number}.0'
        await asyncio.to_thread(wait_until, lambda: name in metrics(server))

    async with server.async_client() as client:
        async with going_on(Stream(client, model="fake", prompt="x", max_tokens=8000, extra_body={"priority": -100})):
            bronze = [asyncio.create_task(one(client, "bronze", stream=index % 2 == 0)) for index in range(10)]
            await until_in_line("bronze", 10)
            gold = [
                asyncio.create_task(one(client, "gold", stream=False)),
                asyncio.create_task(one(client, "gold", stream=True, n=2, stream_options=options)),
            ]
            await until_in_line("gold", 2)
        return await asyncio.gather(*bronze, *gold)


def metrics(server: Server) -> str:
    return server.request("GET", "/metrics").data.decode()


def test_gold_passes_bronze_and_replies_have_their_times(server: Server) -> None:
    replies = asyncio.run(crowd(server))
    text = metrics(server)
    trace = server.stop_and_verify()
    classes = {event.s: event.scheduling.service_class for event in trace.of(Arrived)}
    firsts = list(dict.fromkeys((row[0], row[1]) for launch in trace.of(Launched) for row in launch.chunks))
    order = [classes[request] for request, _ in firsts]
    assert list(classes.values()) == ["", *["bronze"] * 10, *["gold"] * 2]
    # Gold came last, and all of bronze went behind it.
    assert order == ["", *["gold"] * 3, *["bronze"] * 10]
    check_timings(trace, server.trace, replies)
    gold = replies[10:]
    assert [each["index"] for each in gold[1]["timings"]] == [0, 1]
    assert all(each["deadline_met"] is True and each["slo_met"] is True for reply in gold for each in reply["timings"])
    bronze = [each for reply in replies[:10] for each in reply["timings"]]
    assert all(each["deadline_met"] is None and each["slo_met"] is False for each in bronze)
    for line in (
        'eventlm:class_requests_total{service_class="gold"} 2.0',
        'eventlm:class_deadlines_met_total{service_class="gold"} 3.0',
        'eventlm:class_slo_met_total{service_class="gold"} 3.0',
        'eventlm:class_slo_missed_total{service_class="bronze"} 10.0',
        'eventlm:class_time_to_first_token_seconds_count{service_class="bronze"} 10.0',
    ):
        assert line in text, line


def test_an_unreachable_deadline_is_rejected_first(server: Server) -> None:
    client = server.client()
    completions, chats = client.completions, client.chat.completions

    def is_late(ask: Callable[..., object], **fields: Any) -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            ask(model="fake", **fields)
        error = caught.value
        assert (error.status_code, error.code, error.type) == (504, "deadline_exceeded", "server_error")

    for stream in (False, True):
        # 5 ms are predicted, so it is turned away as it comes.
        hasty = {"extra_headers": {"x-eventlm-class": "hasty"}, "extra_body": TIMED}
        is_late(completions.create, prompt="x", stream=stream, **hasty)
    fields: Any = {"extra_body": {"drop_if_late": True, "deadline_ms": 200}}
    with completions.create(model="fake", prompt="long", max_tokens=8000, stream=True) as long:
        next(iter(long))
        # The one slot is taken: they wait until it is too late to begin.
        for stream in (False, True):
            is_late(completions.create, prompt="x", stream=stream, **fields)
            is_late(chats.create, messages=[{"role": "user", "content": "hi"}], stream=stream, **fields)
        is_late(client.embeddings.create, input="x", **fields)
    trace = server.stop_and_verify()
    assert trace.finish_reasons["deadline"] == 7
    # Two needed no timer.
    assert len(trace.of(TimerDue)) == 5
    rows = [row for row in Rows(trace.events).by_identity.values() if row.reason == "deadline"]
    assert {row.met_deadline for row in rows} == {False}
    # The run can be asked what if: its timers fire in a repetition as they did.
    assert null_test(read_run(server.trace), server.trace).difference == ""


def test_a_reply_is_explained_while_the_server_runs(start_server: StartServer) -> None:
    server = start_server(
        *("--model", "fake", "--fake", "base_ns=5000000", "--record-segment", "16KiB", "--api-servers", "1")
    )
    client = server.client()
    for number in range(4):
        client.completions.create(model="fake", prompt=f"earlier {number}", max_tokens=30)
    reply = client.completions.create(
        model="fake", prompt=["one", "two"], n=2, max_tokens=5, extra_body=TIMED, extra_headers={"x-request-id": "me"}
    ).to_dict()
    assert len(list(server.trace.resolve().parent.glob("trace-*.jsonl"))) > 1
    explained = server.request("GET", f"/v1/requests/{reply['id']}/explain")
    assert explained.status == 200, explained.data
    body = explained.json()
    assert str(server.folder).encode() not in explained.data
    told: Any = reply["eventlm"]
    pairs = [(each["request"], each["index"], each["total_ns"] / 1e6) for each in body["explanations"]]
    assert pairs == [(each["request"], each["sample"], each["total_ms"]) for each in told["timings"]]
    text = server.request("GET", "/v1/requests/me/explain?format=text")
    assert text.data.decode().count("took ") >= 4
    assert text.headers["content-type"].startswith("text/plain")
    with client.completions.create(model="fake", prompt="x", max_tokens=8000, stream=True) as stream:
        name = next(iter(stream)).id
        state = server.request("GET", f"/v1/requests/{name}").json()
        assert (state["state"], state["choices"][0]["timings"]) == ("running", None)
        (unfinished,) = server.request("GET", f"/v1/requests/{name}/explain").json()["explanations"]
        assert unfinished["outcome"] == "unfinished"
    assert server.stop() == 0
    run = server.trace.resolve().parent
    check_timings(verified(run), run, [told])


def test_without_a_record_nothing_is_explained(start_server: StartServer) -> None:
    server = start_server("--model", "fake", "--no-record")
    reply = server.complete(eventlm={"timings": True}).json()
    assert reply["eventlm"]["timings"][0]["total_ms"] > 0
    refused = server.request("GET", f"/v1/requests/{reply['id']}/explain")
    assert (refused.status, json.loads(refused.data)["error"]["code"]) == (409, "not_recorded")
    assert refused.headers["x-should-retry"] == "false"
    assert server.request("GET", f"/v1/requests/{reply['id']}").json()["state"] == "finished"
