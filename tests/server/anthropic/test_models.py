"""The list of models through the official client; OpenAI's clients get their own."""

from __future__ import annotations

from datetime import UTC, datetime

import anthropic
import pytest
from anthropic.types import ModelInfo

from tests.server.anthropic.conftest import Start


def test_models(start_with_anthropic: Start) -> None:
    server, client = start_with_anthropic()
    page = client.models.list()
    assert [model.id for model in client.models.list()] == ["test", "org/test"]
    assert (page.has_more, page.first_id, page.last_id) == (False, "test", "org/test")
    info = client.models.retrieve("org/test")
    ModelInfo.model_validate(info.model_dump(), strict=True)
    assert info.to_dict(mode="json") == {
        "id": "org/test",
        "type": "model",
        "display_name": "org/test",
        "created_at": datetime.fromtimestamp(server.context.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": 4096,
        "max_tokens": 4096,
    }
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("claude")
    assert server.request("GET", "/v1/models").json()["object"] == "list"
    assert server.request("GET", "/v1/models/org/test").json()["object"] == "model"
