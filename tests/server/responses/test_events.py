"""What events have, against the types of OpenAI's own client."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from msgspec import structs
from openai.types import responses

from eventlm.server.responses.events import ResponseEvent

MODELS: dict[str, Any] = {
    get_args(model.model_fields["type"].annotation)[0]: model
    for name, model in vars(responses).items()
    if name.endswith("Event") and "type" in getattr(model, "model_fields", {})
}
#: Of other output than text and calls of functions, and of responses that wait (which are not streamed from here).
ABSENT = (
    "audio", "transcript", "code_interpreter", "computer", "custom_tool_call", "file_search", "image_generation",
    "mcp", "web_search", "refusal", "annotation", "summary", "shell", "apply_patch", "compaction", "steer", "queued",
    "response.inject",
)  # fmt: skip
EVENTS = get_args(ResponseEvent)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_an_event_has_the_documented_fields(event: Any) -> None:
    found = {"type", *(field.encode_name for field in structs.fields(event))}
    # Older clients know the name of the function.
    assert found - {"name"} == set(MODELS[event.__struct_config__.tag].model_fields) - {"agent", "name"}


def test_every_event_of_text_and_calls_is_there() -> None:
    sent = {event.__struct_config__.tag for event in EVENTS}
    assert len(sent) == len(EVENTS) > 15
    assert not [name for name in MODELS.keys() - sent if not any(part in name for part in ABSENT)]
