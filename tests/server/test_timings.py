"""What a reply says of its times: each choice's row, in milliseconds to the nanosecond."""

from __future__ import annotations

import openai
import pytest

from eventlm.server.timings import timings
from tests.server.conftest import INVALID, RunningServer, assert_error
from tests.server.endpoints.test_request_info import ROW


def test_choices_in_their_order_and_times_that_add_up() -> None:
    found = timings({3: ROW, 1: ROW}).timings
    assert [each.index for each in found] == [1, 3]
    first = found[0]
    assert first.queued_ms is not None
    assert first.prefill_ms is not None
    assert first.edge_ms + first.queued_ms + first.prefill_ms == first.ttft_ms
    assert first.decode_ms is None


@pytest.mark.parametrize("fields", [{}, {"eventlm": None}, {"eventlm": {}}, {"eventlm": {"timings": False}}])
def test_timings_are_sent_only_on_request(server: RunningServer, fields: dict[str, object]) -> None:
    assert "eventlm" not in server.chat(**fields).json()
    events = server.complete(stream=True, **fields).events()
    assert all("eventlm" not in event for event in events)


def test_a_stream_without_usage_ends_in_a_chunk_of_timings_alone(server: RunningServer) -> None:
    *_, last, done = server.chat(stream=True, eventlm={"timings": True}).events()
    assert done == "[DONE]"
    assert (last["choices"], "usage" in last, last["eventlm"]) == ([], False, {"timings": []})
    *_, last, done = server.chat(
        stream=True, eventlm={"timings": True}, stream_options={"include_usage": True}
    ).events()
    assert (last["choices"], last["usage"]["completion_tokens"] > 0, last["eventlm"]) == ([], True, {"timings": []})


def test_the_official_client_takes_it(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    extra = {"eventlm": {"timings": True}}
    reply = client.embeddings.create(model="test", input="x", extra_body=extra)
    assert reply.to_dict()["eventlm"] == {"timings": []}
    assert_error(server.chat(eventlm={"timings": 1}), 400, INVALID, "eventlm.timings", "invalid_type")
    assert_error(server.chat(eventlm=True), 400, INVALID, "eventlm", "invalid_type")
