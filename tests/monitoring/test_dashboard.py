"""The dashboard is what Grafana imports, and every query of it has data once a server is scraped."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from eventlm.monitoring.alerts import Thresholds
from eventlm.monitoring.dashboard import dashboard_file, panel_rows
from eventlm.monitoring.files import monitoring_files, write_files
from tests.monitoring.prometheus import RunningPrometheus, needs_prometheus, running_prometheus
from tests.processes import wait_until
from tests.serving import Server

DASHBOARD: dict[str, Any] = json.loads(dashboard_file("eventlm"))
#: What Grafana's documentation says of the JSON model, as far as this dashboard uses it.
SCHEMA = {
    "type": "object",
    "required": ["title", "uid", "schemaVersion", "time", "templating", "panels"],
    "properties": {
        "schemaVersion": {"type": "integer", "minimum": 36},
        "uid": {"type": "string", "maxLength": 40},
        "panels": {"type": "array", "items": {"$ref": "#/$defs/panel"}},
        "templating": {
            "properties": {"list": {"items": {"required": ["name", "type", "query"]}}},
        },
    },
    "$defs": {
        "panel": {
            "required": ["id", "type", "title", "gridPos"],
            "properties": {
                "id": {"type": "integer"},
                "type": {"enum": ["row", "timeseries"]},
                "gridPos": {
                    "required": ["h", "w", "x", "y"],
                    "properties": {"w": {"minimum": 1, "maximum": 24}, "x": {"minimum": 0, "maximum": 23}},
                },
                "targets": {"minItems": 1, "items": {"required": ["refId", "expr", "legendFormat", "datasource"]}},
            },
            "if": {"properties": {"type": {"const": "timeseries"}}},
            "then": {"required": ["targets", "fieldConfig", "datasource"]},
        }
    },
}


def test_it_is_as_grafana_reads_it() -> None:
    jsonschema.validate(DASHBOARD, SCHEMA)
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        letters = [target["refId"] for target in panel.get("targets", [])]
        assert len(set(letters)) == len(letters)


def test_no_two_panels_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in DASHBOARD["panels"]):
        cells = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert max(x for x, _ in cells) < 24
        assert not cells & taken
        taken |= cells


def load(server: Server, stop: threading.Event, fields: dict[str, Any]) -> None:
    """Requests until the end."""
    for number in itertools.count():
        if stop.is_set():
            return
        server.complete(
            prompt=f"a prompt of some length, the {number % 3}th, which comes again", max_tokens=24, **fields
        )


@pytest.fixture
def loaded_servers(tmp_path: Path) -> Iterator[list[Server]]:
    """One under requests with deadlines and objectives, and a gateway in front of it."""
    folder, front = tmp_path / "server", tmp_path / "gateway"
    folder.mkdir()
    front.mkdir()
    server = Server(
        folder, "--model", "fake", "--fake", "base_ns=3000000", "--replicas", "2", "--api-servers", "1",
        "--service-class", "gold:deadline_ms=500,slo_ttft_ms=500", "--otlp-endpoint", "http://127.0.0.1:9",
    )  # fmt: skip
    stop = threading.Event()
    threads: list[threading.Thread] = []
    servers = [server]
    try:
        server.wait_ready()
        servers.append(Server(front, "--backend", server.url, "--probe-interval-ms", "200"))
        servers[1].wait_ready()
        for each, fields in ((server, {"service_tier": "gold"}), (server, {"service_tier": "gold"}), (servers[1], {})):
            threads.append(threading.Thread(target=load, args=(each, stop, fields)))
            threads[-1].start()
        yield servers
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for each in reversed(servers):
            each.close()


@needs_prometheus
@pytest.mark.long
def test_every_query_has_data(tmp_path: Path, loaded_servers: list[Server], unused_tcp_port: int) -> None:
    first, second = (json.dumps(server.url.removeprefix("http://")) for server in loaded_servers)
    files = monitoring_files("eventlm", json.loads(first), Thresholds())
    scraped = files["prometheus.yml"].replace("scrape_interval: 5s", "scrape_interval: 200ms")
    files["prometheus.yml"] = scraped.replace(f"[{first}]", f"[{first}, {second}]")
    write_files(tmp_path, files)
    expressions = [
        expression.replace("$job", "eventlm").replace("$instance", ".*").replace("$__rate_interval", "30s")
        for row in panel_rows()
        for panel in row.panels
        for expression, _ in panel.queries
    ]
    with running_prometheus(tmp_path, unused_tcp_port) as prometheus:
        waiting = list(expressions)

        def have_data() -> bool:
            waiting[:] = [expression for expression in waiting if not has_data(prometheus, expression)]
            return not waiting

        try:
            wait_until(have_data)
        except AssertionError:
            pytest.fail("these have no data:\n" + "\n".join(waiting))


def has_data(prometheus: RunningPrometheus, expression: str) -> bool:
    """Whether an expression has a number now."""
    return any(not math.isnan(float(series["value"][1])) for series in prometheus.query(expression))
