"""A stand-in for a backend: a server on 127.0.0.1 that speaks OpenAI's API in the manner of one kind of server.

    async with StubBackend("llamacpp", num_tokens=20) as stub:
        client = HttpBackend(BackendSpec(url=stub.url))

What it answers depends on the prompt and the seed alone (`reply_text`), and a prompt that ends in a part of an answer
is answered with the rest, so that texts can be checked whatever happened on the way. All attributes may be changed
while it runs. What goes wrong is a list of `Fault`. `python -m tests.gateway.stub_backend` runs one in a process of its
own.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import re
import struct
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from ssl import SSLContext
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from eventlm.config.backends import BackendKind
from tests.gateway.stub_faults import Fault, error, fault_reply, go_wrong

#: Token ids of answers start here, so that they can be told from those of prompts.
FIRST_TOKEN_ID = 100_000
_ANSWER = re.compile(r"(?:~[0-9a-f]{3})*\Z")
_CHARACTERS_PER_TOKEN = 4


def reply_tokens(prompt: str, seed: int, num_tokens: int) -> list[str]:
    """The tokens of the answer to a prompt, each four characters such as `~0f3`."""
    digest = blake2b(f"{seed}/{prompt}".encode()).hexdigest()
    return [f"~{digest[i % 42 * 3 :][:2]}{i % 16:x}" for i in range(num_tokens)]


def reply_text(prompt: str, seed: int, num_tokens: int) -> str:
    """The whole answer to a prompt."""
    return "".join(reply_tokens(prompt, seed, num_tokens))


def chat_prompt(messages: list[dict[str, Any]]) -> str:
    """What `reply_text` takes for a conversation."""
    return "".join(f"<{message['role']}>{message.get('content')}" for message in messages)


@dataclass
class Received:
    """A request as it came; names of headers in small letters."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]


@dataclass
class StubBackend:
    """See the module. Use it in `async with`.

    num_tokens: of each answer, at most as many as the request allows. first_delay, token_delay: seconds before the
    first token and before each other. prompt_token_delay: for each token of a prompt that is not cached, one prompt
    after the other; running_delay: more before each token for each other request that runs. tokens_per_chunk: in one
    event. max_concurrency: requests beyond wait in its own queue; 0: none wait. key: the bearer key that it wants.
    cache_blocks: size of its prefix cache in blocks of `block_characters`. reasoning: comes before each answer. calls:
    tool calls of each answer, (name, arguments). metrics: whether `/metrics` is there. max_model_len: as it says. port:
    0: any.
    """

    kind: BackendKind = "vllm"
    model: str = "stub"
    num_tokens: int = 8
    first_delay: float = 0.0
    token_delay: float = 0.0
    prompt_token_delay: float = 0.0
    running_delay: float = 0.0
    tokens_per_chunk: int = 1
    max_concurrency: int = 0
    key: str = ""
    cache_blocks: int = 0
    block_characters: int = 64
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    metrics: bool = True
    max_model_len: int = 4096
    host: str = "127.0.0.1"
    port: int = 0
    server_id: str = "stub-server"
    tls: SSLContext | None = None

    #: Requests to generate or embed, in the order of their arrival.
    requests: list[Received] = field(default_factory=list)
    num_running: int = 0
    num_waiting: int = 0
    #: The most requests that it ran at once.
    max_running: int = 0
    num_completed: int = 0
    #: Requests whose client left.
    num_cancelled: int = 0
    #: Blocks of prompts looked up in the prefix cache, and found.
    queried_blocks: int = 0
    hit_blocks: int = 0

    def __post_init__(self) -> None:
        self._cache: OrderedDict[str, None] = OrderedDict()
        self._room = asyncio.Condition()
        self._prefill = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http{'s' if self.tls else ''}://{self.host}:{self.port}"

    @property
    def hit_rate(self) -> float:
        """Found blocks of those looked up."""
        return self.hit_blocks / max(self.queried_blocks, 1)

    async def start(self) -> None:
        """Listen; again on the same port after `stop`."""
        app = web.Application(middlewares=[self._check_key], client_max_size=1 << 26)
        app.router.add_get("/{path:.*}", self._get)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/embeddings", self._embed)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, ssl_context=self.tls, backlog=4096)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the port and all connections, as a process that is killed."""
        runner, self._runner = self._runner, None
        if runner is not None:
            if runner.server is not None:
                for connection in runner.server.connections:
                    if connection.transport is not None:
                        connection.transport.abort()
            await runner.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        sent = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.key and sent != self.key:
            # As OpenAI's does.
            return error(401, f"Incorrect API key provided: {sent}.", code="invalid_api_key")
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _get(self, request: web.Request) -> web.Response:
        path = request.path
        if path == "/metrics" and self.metrics:
            text = self._metrics_text()
            return web.Response(text=text) if text else error(404, "Not Found")
        answer = {"/health": {"status": "ok"}, "/v1/models": self._models(), **self._pages()}.get(path)
        return error(404, "Not Found") if answer is None else web.json_response(answer)

    def _models(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"id": self.model, "object": "model", "created": 0, "owned_by": self.kind}
        match self.kind:
            case "vllm" | "sglang":
                entry |= {"root": self.model, "parent": None, "max_model_len": self.max_model_len}
            case "eventlm":
                entry |= {"max_model_len": self.max_model_len}
            case "llamacpp":
                entry |= {"meta": {"n_ctx": self.max_model_len, "n_ctx_train": 32768}}
        return {"object": "list", "data": [entry]}

    def _pages(self) -> dict[str, dict[str, Any]]:
        """What this kind of server says of itself."""
        slots = self.max_concurrency or 4
        props = {
            "default_generation_settings": {"n_ctx": self.max_model_len},
            "total_slots": slots,
            "build_info": "b9999-stub",
        }
        match self.kind:
            case "vllm":
                return {"/version": {"version": "0.99.0"}}
            case "eventlm":
                return {"/version": {"version": "0.9.0", "server_id": self.server_id}, "/props": props}
            case "llamacpp":
                return {"/props": props}
            case "ollama":
                return {"/api/version": {"version": "0.99.1"}}
            case "sglang":
                info = {
                    "version": "0.5.99",
                    "max_total_num_tokens": self.cache_blocks * self.block_characters // _CHARACTERS_PER_TOKEN,
                    "internal_states": [{"effective_max_running_requests_per_dp": slots}],
                }
                return {"/server_info": info, "/get_server_info": info}
            case _:
                return {}

    def _metrics_text(self) -> str:
        running, waiting = self.num_running, self.num_waiting
        used = len(self._cache) / self.cache_blocks if self.cache_blocks else 0.0
        tokens_per_block = self.block_characters // _CHARACTERS_PER_TOKEN
        match self.kind:
            case "vllm" | "eventlm":
                label = f'{{engine="0",model_name="{self.model}"}}'
                return (
                    f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{label} {running}.0\n"
                    f"vllm:num_requests_waiting{label} {waiting}.0\nvllm:kv_cache_usage_perc{label} {used}\n"
                    f'vllm:cache_config_info{{block_size="{tokens_per_block}",'
                    f'num_gpu_blocks="{self.cache_blocks}"}} 1.0\n'
                )
            case "sglang":
                label = f'{{model_name="{self.model}",tp_rank="0"}}'
                return (
                    f"sglang:num_running_reqs{label} {running}.0\nsglang:num_queue_reqs{label} {waiting}.0\n"
                    f"sglang:token_usage{label} {used}\n"
                )
            case "llamacpp":
                return f"llamacpp:requests_processing {running}\nllamacpp:requests_deferred {waiting}\n"
            case _:
                return ""

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(Received(request.path, _lower(request.headers), body))
        number = len(self.requests)
        fault = next((fault for fault in self.faults if fault.hits(number)), None)
        if fault is not None and fault.kind == "status":
            return fault_reply(fault)
        try:
            async with _Place(self):
                response = await self._stream(request, body, fault)
        except (asyncio.CancelledError, ConnectionError):
            self.num_cancelled += 1
            raise
        self.num_completed += 1
        return response

    async def _stream(self, request: web.Request, body: dict[str, Any], fault: Fault | None) -> web.StreamResponse:
        is_chat = request.path.endswith("chat/completions")
        base, num_shown = _split_prompt(body, is_chat)
        num_cached = self._look_up(base)
        if fault is not None and fault.kind == "hang":
            await asyncio.Event().wait()
        if fault is not None and fault.kind == "late":
            await asyncio.sleep(fault.seconds)
            fault = None
        if self.prompt_token_delay:
            async with self._prefill:
                await asyncio.sleep((len(base) // _CHARACTERS_PER_TOKEN - num_cached) * self.prompt_token_delay)
        await asyncio.sleep(self.first_delay)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        tokens = reply_tokens(base, body.get("seed") or 0, self.num_tokens)[num_shown:]
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        reason = "stop" if limit is None or limit >= len(tokens) else "length"
        tokens = tokens[:limit]
        num_prompt = -(-len(base) // _CHARACTERS_PER_TOKEN) + num_shown
        options = body.get("stream_options") or {}
        chunk = ChunkWriter(self, is_chat, num_prompt, num_cached, bool(options.get("continuous_usage_stats")))
        wants_ids = bool(body.get("return_token_ids"))
        if is_chat:
            await response.write(chunk.delta({"role": "assistant", "content": ""}))
            if self.reasoning:
                await response.write(chunk.delta({"reasoning_content": self.reasoning}))
        step = self.tokens_per_chunk
        for start in range(0, len(tokens), step):
            if fault is not None and start >= fault.after:
                break
            if start and self.token_delay:
                await asyncio.sleep(self.token_delay + self.running_delay * (self.num_running - 1))
            part = tokens[start : start + step]
            await response.write(chunk.tokens(part, has_ids=wants_ids))
            await asyncio.sleep(0)
        if fault is not None:
            await go_wrong(request, response, fault, chunk, reason, len(tokens))
            return response
        if is_chat and self.calls:
            reason = "tool_calls"
            for index, (name, arguments) in enumerate(self.calls):
                for part_ in (
                    {"index": index, "id": f"call_{index}", "function": {"name": name, "arguments": ""}},
                    {"index": index, "function": {"arguments": arguments}},
                ):
                    await response.write(chunk.delta({"tool_calls": [part_]}))
        await response.write(chunk.end(reason))
        if options.get("include_usage"):
            await response.write(chunk.usage(len(tokens)))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _embed(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(Received(request.path, _lower(request.headers), body))
        digest = blake2b(str(body["input"]).encode(), digest_size=32).digest()
        vector = [byte / 256 for byte in digest]
        data = struct.pack("<32f", *vector)
        is_base64 = body.get("encoding_format") == "base64" and self.kind != "ollama"
        return web.json_response(
            {
                "object": "list",
                "data": [{"index": 0, "embedding": base64.b64encode(data).decode() if is_base64 else vector}],
                "model": self.model,
                "usage": {"prompt_tokens": 3, "total_tokens": 3},
            }
        )

    def _look_up(self, prompt: str) -> int:
        """Look up a prompt in the prefix cache and keep it there; the tokens found."""
        if not self.cache_blocks:
            return 0
        size = self.block_characters
        prefixes = [blake2b(prompt[:end].encode()).hexdigest() for end in range(size, len(prompt) + 1, size)]
        num_found = next((n for n, prefix in enumerate(prefixes) if prefix not in self._cache), len(prefixes))
        self.queried_blocks += len(prefixes)
        self.hit_blocks += num_found
        # The end of a prompt goes before its start.
        for prefix in reversed(prefixes):
            self._cache[prefix] = None
            self._cache.move_to_end(prefix)
        while len(self._cache) > self.cache_blocks:
            self._cache.popitem(last=False)
        return num_found * size // _CHARACTERS_PER_TOKEN


class _Place:
    """A place among the requests that run; those beyond the limit wait for one in turn."""

    def __init__(self, stub: StubBackend) -> None:
        self._stub = stub

    async def __aenter__(self) -> None:
        stub = self._stub
        stub.num_waiting += 1
        try:
            async with stub._room:
                await stub._room.wait_for(lambda: not stub.max_concurrency or stub.num_running < stub.max_concurrency)
                stub.num_running += 1
        finally:
            stub.num_waiting -= 1
        stub.max_running = max(stub.max_running, stub.num_running)

    async def __aexit__(self, *_: object) -> None:
        self._stub.num_running -= 1
        async with self._stub._room:
            self._stub._room.notify()


class ChunkWriter:
    """Writes the events of one stream."""

    def __init__(self, stub: StubBackend, is_chat: bool, num_prompt: int, num_cached: int, has_usage: bool) -> None:
        name = "chat.completion.chunk" if is_chat else "text_completion"
        self._start = f'data: {{"id":"stub-1","object":"{name}","created":0,"model":"{stub.model}","choices":['
        self._is_chat = is_chat
        self._num_prompt, self._num_cached = num_prompt, num_cached
        self._has_usage = has_usage and stub.kind in ("vllm", "sglang", "eventlm")
        self._num_tokens = 0

    def tokens(self, tokens: list[str], *, has_ids: bool = False) -> bytes:
        """Of output tokens."""
        self._num_tokens += len(tokens)
        text = "".join(tokens)
        content = f'"delta":{{"content":"{text}"}}' if self._is_chat else f'"text":"{text}"'
        ids = f',"token_ids":{[FIRST_TOKEN_ID + int(token[1:], 16) for token in tokens]}' if has_ids else ""
        usage = f',"usage":{self._usage(self._num_tokens)}' if self._has_usage else ""
        return f'{self._start}{{"index":0,{content},"logprobs":null,"finish_reason":null{ids}}}]{usage}}}\n\n'.encode()

    def delta(self, delta: dict[str, Any]) -> bytes:
        """Of another part of a chat's message."""
        return f'{self._start}{{"index":0,"delta":{json.dumps(delta)},"finish_reason":null}}]}}\n\n'.encode()

    def end(self, reason: str) -> bytes:
        """The last of the choice."""
        content = '"delta":{}' if self._is_chat else '"text":""'
        return f'{self._start}{{"index":0,{content},"finish_reason":"{reason}"}}]}}\n\n'.encode()

    def usage(self, num_tokens: int) -> bytes:
        """The last of the stream."""
        return f'{self._start}],"usage":{self._usage(num_tokens)}}}\n\n'.encode()

    def _usage(self, num_tokens: int) -> str:
        details = f'"prompt_tokens_details":{{"cached_tokens":{self._num_cached}}}'
        total = self._num_prompt + num_tokens
        return (
            f'{{"prompt_tokens":{self._num_prompt},"completion_tokens":{num_tokens},"total_tokens":{total},{details}}}'
        )


def _split_prompt(body: dict[str, Any], is_chat: bool) -> tuple[str, int]:
    """What `reply_text` takes, and how many tokens of the answer the prompt ends in."""
    if is_chat:
        messages = body["messages"]
        if body.get("continue_final_message"):
            return chat_prompt(messages[:-1]), len(messages[-1]["content"]) // 4
        return chat_prompt(messages), 0
    prompt = body["prompt"]
    if isinstance(prompt, str):
        found = _ANSWER.search(prompt)
        assert found is not None
        return prompt[: found.start()], len(found.group()) // 4
    ids = [token_id for token_id in prompt if token_id < FIRST_TOKEN_ID]
    return str(ids), len(prompt) - len(ids)


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


async def _serve(stub: StubBackend) -> None:
    async with stub:
        print(stub.url, flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Run one until it is ended; it prints its address first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="vllm")
    parser.add_argument("--port", type=int, default=0)
    for name, default in (("num_tokens", 64), ("tokens_per_chunk", 1), ("max_concurrency", 0), ("cache_blocks", 0)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    for name in ("first_delay", "token_delay", "prompt_token_delay", "running_delay"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=0.0)
    asyncio.run(_serve(StubBackend(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
