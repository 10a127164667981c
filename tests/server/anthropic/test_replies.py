"""What replies and events look like as JSON, and how usage is counted."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
import pytest
from anthropic.types import Usage
from anthropic.types.stop_reason import StopReason
from msgspec import UNSET, UnsetType

from eventlm.server.anthropic.replies import MessageEvent, MessageStop, MessageUsage, StopDelta
from eventlm.text.generation import UsageCounts
from tests.server.anthropic.conftest import Start
from tests.server.anthropic.conversations import TOOLS, events_of, send
from tests.server.engine_double import spell


@pytest.mark.parametrize(
    ("counts", "tier", "expected"),
    [
        (UsageCounts(10, 5, 0, None), UNSET, {"input_tokens": 10, "cache_read_input_tokens": 0, "output_tokens": 5}),
        (UsageCounts(10, 5, 8, 3), "default", {"input_tokens": 2, "cache_read_input_tokens": 8, "output_tokens": 5}),
        (UsageCounts(10, 5, 10, 0), "gold", {"input_tokens": 0, "cache_read_input_tokens": 10, "service_tier": "gold"}),
    ],
)
def test_usage(counts: UsageCounts, tier: str | UnsetType, expected: dict[str, Any]) -> None:
    usage = msgspec.to_builtins(MessageUsage.of(counts, tier))
    assert usage.items() >= ({"cache_creation_input_tokens": 0, "service_tier": "standard"} | expected).items()
    thinking = usage.get("output_tokens_details", {}).get("thinking_tokens")
    assert thinking == counts.reasoning
    Usage.model_validate(usage | {"service_tier": "standard"}, strict=True)


def test_stop_reasons_are_anthropic_s() -> None:
    assert set(get_args(MessageStop)) < set(get_args(StopReason))
    assert msgspec.json.encode(StopDelta("end_turn", None)) == b'{"stop_reason":"end_turn","stop_sequence":null}'


def test_events_are_those_that_are_described(start_with_anthropic: Start) -> None:
    server, _ = start_with_anthropic(reasoning_parser="qwen3")
    server.engine.script = spell('<think>Hm.</think>Hi.<tool_call>{"name": "add", "arguments": {}}</tool_call>')
    events = events_of(send(server, tools=TOOLS, stream=True))
    assert len({event["type"] for event in events}) == 7
    for event in events:
        decoded = msgspec.json.decode(json.dumps(event), type=MessageEvent)
        assert json.loads(msgspec.json.encode(decoded)) == event
