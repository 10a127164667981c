"""Schemathesis over /openapi.json: what it makes of the schemas, and of their opposite, sent to a running server."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CheckFunction
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from eventlm.server.app import ENDPOINTS
from eventlm.server.batches.objects import CreateBatchRequest
from eventlm.server.endpoints.openapi import Endpoint, openapi_path
from eventlm.server.vllm.chat_batch import ChatBatchRequest
from tests.server.described import assert_idle
from tests.serving import Server, serve

#: The handlers refuse more than schemas can say: a token id that the model does not have, a prompt over the context.
UNCHECKED: list[CheckFunction] = [positive_data_acceptance]
#: Some have two paths.
each_endpoint = pytest.mark.parametrize(
    "endpoint",
    {endpoint.handler: endpoint for endpoint in ENDPOINTS}.values(),
    ids=lambda endpoint: f"{endpoint.method} {endpoint.path}",
)


def budget(num_examples: int) -> settings:
    """Of each operation so many examples, the same ones every time."""
    return settings(
        max_examples=num_examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A short context and a fast model: examples may leave max_tokens out and ask for many samples."""
    fast = "base_ns=100000,prefill_token_ns=0,decode_ns=0,context_token_ns=0"
    flags = ("--model", "fake", "--max-model-len", "64", "--fake", fast, "--batch-dir", "batches")
    with serve(tmp_path_factory.mktemp("server"), *flags) as server:
        yield server
        assert_idle(server)


@pytest.fixture(scope="module")
def described(server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@st.composite
def valid_cases(draw: st.DrawFn, operation: Any, endpoint: Endpoint, server: Server) -> schemathesis.Case:
    """By the schema, for the model that there is, and few fields at a time: together they are rarely allowed."""
    case = draw(operation.as_strategy(GenerationMode.POSITIVE))
    if isinstance(case.body, dict):
        optional = sorted(case.body.keys() - {"model", "prompt", "messages", "input", "tokens"})
        kept = draw(st.sets(st.sampled_from(optional), max_size=4)) if optional else set()
        for name in optional:
            if name not in kept:
                del case.body[name]
        case.body["model"] = server.model
        messages = case.body.get("messages") or []
        for message in itertools.chain(*messages) if endpoint.body is ChatBatchRequest else messages:
            # What else a message may have depends on its role.
            role, content = message["role"], message.get("content") or "hi"
            message.clear()
            message.update(role="user" if role == "tool" else role, content=content)
    return case


def exercise(server: Server, described: Any, endpoint: Endpoint, num_examples: int) -> Counter[int]:
    """Calls of one operation, by its schema and against it; how many replies had which status."""
    statuses: Counter[int] = Counter()
    operation = described[openapi_path(endpoint.path)][endpoint.method]

    def check(case: schemathesis.Case) -> None:
        response = case.call()
        statuses[response.status_code] += 1
        # What is too large is refused as that, whatever it is.
        unchecked = [*UNCHECKED, negative_data_rejection] if response.status_code == 413 else UNCHECKED
        case.validate_response(response, excluded_checks=unchecked)
        assert response.status_code < 500

    budget(num_examples)(given(case=valid_cases(operation, endpoint, server))(check))()
    if endpoint.body is not None:
        budget(num_examples)(given(case=operation.as_strategy(GenerationMode.NEGATIVE))(check))()
    return statuses


@each_endpoint
def test_every_reply_is_as_described(server: Server, described: Any, endpoint: Endpoint) -> None:
    exercise(server, described, endpoint, 4)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@each_endpoint
def test_every_reply_is_as_described_at_length(server: Server, described: Any, endpoint: Endpoint) -> None:
    statuses = exercise(server, described, endpoint, 40)
    # Nothing has the ids that are drawn, and nobody here has a key for what administers.
    names_an_id = "{" in endpoint.path or endpoint.body is CreateBatchRequest
    assert statuses[200] or names_an_id or endpoint.scope == "admin"


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_its_own_run_finds_nothing(server: Server) -> None:
    """The command line, with the edge cases of every schema and with sequences of calls."""
    arguments = ["run", f"{server.url}/openapi.json", "--exclude-checks", UNCHECKED[0].__name__, "--seed", "1"]
    command = [sys.executable, "-m", "schemathesis.cli", *arguments, "--max-examples", "100", "--continue-on-failure"]
    ended = subprocess.run(command, cwd=server.folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
