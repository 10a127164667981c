"""Inputs of batches, what batches make of them, and clients that wait for it."""

from __future__ import annotations

import json
import time
from typing import Any

import openai

from tests.processes import wait_until

CHAT = "/v1/chat/completions"
#: The statuses of a batch that is over.
OVER = ("completed", "failed", "cancelled", "expired")


def chat_line(custom_id: str, *, model: str = "test", url: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(*lines: Any) -> bytes:
    """A file of these lines; those that are bytes stand as they are."""
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


def upload(client: openai.OpenAI, *lines: Any, name: str = "input.jsonl") -> str:
    return client.files.create(file=(name, jsonl(*lines)), purpose="batch").id


def create(client: openai.OpenAI, *lines: Any, endpoint: Any = CHAT, **fields: Any) -> str:
    file_id = upload(client, *lines)
    return client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h", **fields).id


def wait_for(client: openai.OpenAI, batch_id: str, *statuses: str) -> Any:
    """Poll until the batch has one of these statuses, by default until it is over."""

    def find() -> Any:
        batch = client.batches.retrieve(batch_id)
        if batch.status in (statuses or OVER):
            return batch
        # Each look costs the server more than a line does.
        time.sleep(0.02)
        return None

    return wait_until(find)


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output or error file; none if there is no file."""
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).content.splitlines()]


def contents(lines: list[dict[str, Any]]) -> dict[str, str]:
    """The text of each chat, by its custom_id."""
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}
