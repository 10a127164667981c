"""What /openapi.json promises of replies, and whether they keep it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
from jsonschema import Draft202012Validator

from eventlm.server.app import ERROR_FORMS_BY_PATH
from eventlm.server.errors import error_form
from tests.http_exchange import Reply
from tests.processes import wait_until
from tests.serving import Server

GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def assert_idle(server: Server) -> None:
    """No sequence and no block is left."""

    def is_idle() -> bool:
        lines = server.request("GET", "/metrics").data.decode().splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] in GAUGES]
        assert len(values) == len(GAUGES)
        return not any(values)

    wait_until(is_idle)


class Description:
    """A server's /openapi.json."""

    def __init__(self, server: Server) -> None:
        self.document = server.request("GET", "/openapi.json").json()
        self._validators: dict[str, Draft202012Validator] = {}
        self._paths = [
            (re.compile(re.sub(r"\\\{\w+\\\}", "[^?#]+", re.escape(path))), item)
            for path, item in self.document["paths"].items()
        ]

    def assert_holds(self, method: str, path: str, reply: Reply) -> None:
        """The reply is a valid one of the operation, or an error in the form of its API."""
        assert reply.headers.get("x-request-id"), reply.headers
        if method == "HEAD":
            assert not reply.data
        elif reply.status >= 400:
            self._assert_error(path, reply)
        else:
            assert reply.status == 200
            self._assert_success(self._operation(method, path), reply)

    def _assert_error(self, path: str, reply: Reply) -> None:
        assert reply.status < 500, reply.data
        assert reply.headers["content-type"].partition(";")[0] == "application/json"
        form = error_form(ERROR_FORMS_BY_PATH, urlsplit(path).path)
        body = reply.json()
        # HTTP that cannot be read has no path, so the form of its error is OpenAI's.
        if form is None or (body.keys() == {"error"} and isinstance(body["error"], dict)):
            assert_error_envelope(body)
        else:
            error = msgspec.json.decode(reply.data, type=form.envelope)
            assert json.loads(msgspec.json.encode(error)) == body

    def _operation(self, method: str, path: str) -> dict[str, Any]:
        plain = urlsplit(path).path
        [item] = [item for pattern, item in self._paths if pattern.fullmatch(plain)][:1]
        operation: dict[str, Any] = item[method.lower()]
        return operation

    def _assert_success(self, operation: dict[str, Any], reply: Reply) -> None:
        media_type = reply.headers["content-type"].partition(";")[0]
        schema = operation["responses"]["200"]["content"][media_type]["schema"]
        if media_type == "application/json":
            self._validator(schema).validate(reply.json())
        elif media_type == "text/event-stream":
            events = list(_events(reply))
            if events[-1] == "[DONE]":
                events.pop()
            assert events
            for event in events:
                self._validator(schema).validate(event)
        elif media_type == "application/x-ndjson":
            for line in reply.data.splitlines():
                self._validator(schema).validate(json.loads(line))

    def _validator(self, schema: dict[str, Any]) -> Draft202012Validator:
        key = json.dumps(schema)
        if key not in self._validators:
            self._validators[key] = Draft202012Validator({**schema, "components": self.document["components"]})
        return self._validators[key]


def assert_error_envelope(body: Any) -> None:
    """`{"error": {...}}` and nothing else, with words in it."""
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert isinstance(error["param"], str | None)
    assert isinstance(error["code"], str | None)


def _events(reply: Reply) -> Iterator[Any]:
    """The `data:` lines of a stream, whatever else its events have; `[DONE]` stays a string."""
    for event in reply.data.decode().split("\n\n"):
        for line in event.split("\n"):
            if line.startswith("data: "):
                payload = line.removeprefix("data: ")
                yield payload if payload == "[DONE]" else json.loads(payload)
