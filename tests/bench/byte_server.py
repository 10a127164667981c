"""A small server that keeps what it was asked."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from tests.client.scripted import replying, streaming


class ByteServer:
    """Serves `models`; a prompt has a token a byte, a chat 9 more, and the answer is one token."""

    def __init__(self, *models: str, counts: bool = True) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._models = models
        self._counts = counts

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            if not self._models:
                return await replying(404, '{"error":{"message":"no such thing"}}')(request)
            return await replying(200, json.dumps({"data": [{"id": model} for model in self._models]}))(request)
        body = await request.json()
        self.bodies.append(body)
        size = self.size(body)
        choice = {"index": 0, "text": "x", "delta": {"content": "x"}, "finish_reason": "length"}
        chunks = [{"choices": [choice]}]
        if self._counts:
            chunks.append({"choices": [], "usage": {"prompt_tokens": size, "completion_tokens": 1}})
        return await streaming(*(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks))(request)

    @staticmethod
    def size(body: dict[str, Any]) -> int:
        if "messages" in body:
            return 9 + sum(len(message["content"]) for message in body["messages"])
        return len(body["prompt"])
