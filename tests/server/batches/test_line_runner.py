"""Lines that wait for something of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.processes import wait_until
from tests.server.batches.input_files import create, wait_for
from tests.server.conftest import RunningServer

Start = Callable[..., tuple[RunningServer, openai.OpenAI]]


def test_lines_that_share_a_conversation_run_one_after_the_other(
    start_with_client: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventlm.server.batches.line_runner.RETRY_SECONDS", 0.01)
    monkeypatch.setattr("eventlm.server.batches.line_runner.MAX_LOCKED_LINES", 3)
    server, client = start_with_client(batch_dir=str(tmp_path / "batches"), batch_window=8)
    conversation = client.conversations.create()
    server.engine.most_said = 0

    def line(name: str, **more: Any) -> dict[str, Any]:
        body = {"model": "test", "input": name, **more}
        return {"custom_id": name, "method": "POST", "url": "/v1/responses", "body": body}

    shared = [line(f"shared{number}", conversation=conversation.id) for number in range(5)]
    batch_id = create(client, *shared[:3], line("alone"), *shared[3:], endpoint="/v1/responses")
    # The first of the conversation, and the one that overtakes the others.
    wait_until(lambda: len(server.engine.requests) == 2)
    server.engine.most_said = 10**9
    batch = wait_for(client, batch_id)
    assert batch.request_counts.model_dump() == {"total": 6, "completed": 6, "failed": 0}
    texts = [item.content[0].text for item in client.conversations.items.list(conversation.id, order="asc")]
    assert sorted(texts[::2]) == [each["custom_id"] for each in shared]
    assert texts[1::2] == ["Hello, world"] * 5
