"""A server whose front ends are kept, and clients that never connect twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.keeper.kept_server import KeptServer
from tests.processes import PATIENCE_SECONDS, command_line, is_running, wait_until
from tests.serving import fake_text

#: A step of the fake model takes so long.
SLOW = ("--fake", "base_ns=20000000")


class ServerWithKeptFrontEnds(KeptServer):
    """With two front ends."""

    def __init__(self, folder: Path, *flags: str, **options: Any) -> None:
        super().__init__(folder, "--api-servers", "2", *flags, **options)

    @property
    def front_ends(self) -> list[int]:
        """Process ids of the front ends that run."""
        return [pid for pid in self.processes if b"front_end" in command_line(pid)]

    def kill_front_end(self) -> int:
        """Kill one; its process id."""
        pid: int = wait_until(lambda: self.front_ends)[0]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid))
        return pid


class OneConnection:
    """A request over one connection, until `resume`. is_stream: its reply is one. text, finish_reason, status: of the
    reply so far.
    """

    def __init__(self, server: KeptServer, seed: int, max_tokens: int, *, is_stream: bool) -> None:
        self._server = server
        self.seed = seed
        self.max_tokens = max_tokens
        self.is_stream = is_stream
        # No text has it, but somebody must look.
        fields: dict[str, Any] = {"stop": ["nowhere to be found"]} if seed % 2 else {}
        fields |= {"model": "fake", "prompt": "hi", "seed": seed, "max_tokens": max_tokens, "ignore_eos": True}
        self._body = json.dumps(fields | {"stream": is_stream}).encode()
        self.text = ""
        self.finish_reason = ""
        self.status = 0
        self.comments: list[bytes] = []
        self.is_whole = False
        self.reply_id = ""
        self.event = ""

    async def run(self) -> None:
        """Ask, and read the reply to its end. Raises what the connection does."""
        await self._exchange("POST /v1/completions", self._body)

    async def resume(self) -> None:
        """Ask for the rest of a stream whose connection is lost."""
        await self._exchange(f"GET /v1/stream/{self.reply_id}", b"", f"Last-Event-ID: {self.event}\r\n")

    async def _exchange(self, request: str, body: bytes, header: str = "") -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            reader, writer = await asyncio.open_connection(*self._server.url.removeprefix("http://").split(":"))
            head = f"{request} HTTP/1.0\r\nContent-Type: application/json\r\n{header}"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            try:
                self.status = int((await reader.readline()).split()[1])
                while (await reader.readline()).strip():
                    pass
                if self.is_stream and self.status == 200:
                    lines: list[bytes] = []
                    while line := await reader.readline():
                        lines.append(line.rstrip())
                        # Only a whole event counts.
                        if line == b"\n":
                            self._take(lines)
                            lines = []
                elif self.status == 204:
                    self.is_whole = True
                else:
                    self._take_whole(await reader.read())
            finally:
                writer.close()

    def _take(self, lines: list[bytes]) -> None:
        self.comments += [line for line in lines if line.startswith(b":")]
        fields = dict(line.split(b": ", 1) for line in lines if line and not line.startswith(b":"))
        self.event = fields.get(b"id", self.event.encode()).decode()
        data = fields.get(b"data", b"")
        if data == b"[DONE]":
            self.is_whole = True
        elif data:
            chunk = json.loads(data)
            assert "error" not in chunk, chunk
            self._take_choices(chunk)

    def _take_whole(self, data: bytes) -> None:
        reply = json.loads(data)
        if self.status == 200:
            self._take_choices(reply)
            self.is_whole = True

    def _take_choices(self, reply: dict[str, Any]) -> None:
        self.reply_id = reply["id"]
        for choice in reply["choices"]:
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason

    def check(self) -> None:
        """The reply is whole and exact."""
        assert self.status in (200, 204)
        assert (self.text, self.finish_reason, self.is_whole) == (fake_text(self.seed, self.max_tokens), "length", True)
