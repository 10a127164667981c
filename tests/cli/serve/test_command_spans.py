"""`--otlp-endpoint` of a real server, without and with front ends; and what it refuses at its start."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eventlm.events import Arrived
from tests.cli.conftest import RunHere, StartServer
from tests.processes import children, is_running, wait_until
from tests.serving import Server, verified
from tests.telemetry.receiver import Receiver, check_phases_add_up, receiving
from tests.telemetry.test_spans import spans_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
JSON = {"Content-Type": "application/json"}


def exporting_pid(server: Server) -> int:
    """The process that exports its spans; 0 while there is none."""
    for pid in children(server.process.pid):
        try:
            if b"eventlm.telemetry.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        except FileNotFoundError:
            continue
    return 0


def complete(server: Server, traceparent: str = "") -> None:
    headers = JSON | ({"traceparent": traceparent} if traceparent else {})
    body = b'{"model": "fake", "prompt": "hi", "max_tokens": 9, "n": 2}'
    assert server.request("POST", "/v1/completions", body, headers).status == 200


@pytest.mark.parametrize("num_front_ends", [pytest.param("0", marks=pytest.mark.soak), "1"])
def test_spans_of_a_server(start_server: StartServer, num_front_ends: str) -> None:
    with receiving() as receiver:
        environment = {"OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=a%20b"}
        flags = ("--otlp-endpoint", receiver.url, "--api-servers", num_front_ends)
        server = start_server("--model", "fake", *flags, environment=environment)
        for number in range(6):
            complete(server, f"00-{TRACE}-{SPAN}-01" if number % 2 else "")
        complete(server, "nonsense")
        wait_until(lambda: len(receiver.roots) == 7)
        wait_until(lambda: server_figure(server, "eventlm:otlp_spans_sent_total") == len(receiver.spans))
        assert server_figure(server, "eventlm:otlp_up") == 1
        wait_until(lambda: server_figure(server, "eventlm:otlp_lag_events") == 0)
        complete(server)
        pid = exporting_pid(server)
        assert server.stop() == 0, server.stderr
        assert not is_running(pid)
        check_all(server, receiver)
        assert receiver.headers[0]["x-tenant"] == "a b"
    (end,) = [line for line in map(json.loads, server.stderr.splitlines()) if line["event"] == "spans exported"]
    assert (end["level"], end["sent"], end["dropped"]) == ("info", len(receiver.spans), {})


def server_figure(server: Server, name: str) -> float:
    """A figure of /metrics that has no labels."""
    lines = server.request("GET", "/metrics").data.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + " ", name + "{")))


def check_all(server: Server, receiver: Receiver) -> None:
    """Every request of the trace has its spans, and the callers that were named are parents of theirs."""
    trace = verified(server.trace, check_invariants=False)
    arrivals = [event.s for event in trace.of(Arrived)]
    assert sorted(receiver.roots) == arrivals
    # Each has two samples.
    assert check_phases_add_up(receiver.spans) == 2 * len(arrivals)
    parents = {span.parent_span_id.hex() for span in receiver.roots.values() if span.trace_id.hex() == TRACE}
    with_parent = [span for span in receiver.roots.values() if span.parent_span_id]
    assert (parents, len(with_parent)) == ({SPAN}, 3)
    assert TRACE not in server.trace.read_text()


def test_live_spans_are_those_of_the_trace_over_many_segments(start_server: StartServer) -> None:
    with receiving() as receiver:
        server = start_server(
            "--model", "fake", "--otlp-endpoint", receiver.url, "--record-segment", "16KiB", "--max-num-seqs", "4"
        )
        with ThreadPoolExecutor(8) as clients:
            replies = list(clients.map(lambda number: server.complete(max_tokens=20 + number, n=2), range(16)))
        assert {reply.status for reply in replies} == {200}
        wait_until(lambda: len(receiver.roots) == len(replies))
        assert server.stop() == 0, server.stderr
        folder = server.trace.parent
        assert len(list(folder.glob("trace-*.jsonl"))) > 3
        expected = {(span.span_id, span.parent_id, span.start_ns, span.end_ns) for span in spans_of(folder)}
        assert expected == {
            (span.span_id.hex(), span.parent_span_id.hex(), span.start_time_unix_nano, span.end_time_unix_nano)
            for span in receiver.spans
        }


def test_a_killed_process_is_replaced_and_a_killed_server_leaves_none(start_server: StartServer) -> None:
    with receiving() as receiver:
        server = start_server("--model", "fake", "--otlp-endpoint", receiver.url)
        first = wait_until(lambda: exporting_pid(server))
        os.kill(first, signal.SIGKILL)
        second = wait_until(lambda: (pid := exporting_pid(server)) != first and pid)
        complete(server)
        wait_until(lambda: len(receiver.roots) == 1)
        assert server_figure(server, "eventlm:otlp_restarts_total") == 1
        server.stop(number=signal.SIGKILL)
        wait_until(lambda: not is_running(second))


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (("--no-record", "--otlp-endpoint", "http://127.0.0.1:4318"), "--record DIR"),
        (("--otlp-endpoint", "localhost:4318"), "http://127.0.0.1:4318"),
    ],
)
def test_what_is_refused(run_here: RunHere, flags: tuple[str, ...], hint: str) -> None:
    code, _, errors = run_here("serve", "--model", "fake", "--port", "0", *flags)
    assert code == 2
    assert hint in errors
    assert errors.count("\n") == 1


def test_headers_that_cannot_be_sent_are_refused(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x=secret%0Ab")
    code, _, errors = run_here("serve", "--model", "fake", "--port", "0", "--otlp-endpoint", "http://127.0.0.1:4318")
    assert code == 2
    assert "OTEL_EXPORTER_OTLP_HEADERS" in errors
    assert "secret" not in errors
    assert errors.count("\n") == 1
