"""What a streamed token costs the front end in each API, against a chat's: from the engine's output to framed bytes.

    python benchmarks/server/front_end_apis.py [--tokens 4000] [--rounds 15] [--server] [--streams 32] [--json FILE]

Every API streams the same scripted tokens, one output of the engine each: plain text, text with reasoning and a call
before its end, and text with log-probabilities. Measured is processor time of `StreamEvents`, which includes the
detokenizer and the parsers that all share; the rounds of the APIs alternate, and each API's fastest counts.

--server: also what a token costs the process of `eventlm serve fake` (engine, events and HTTP together) in streams of
plain text, each connection read to its end.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import aiohttp
import msgspec

from eventlm.engine.request import FinishedOutput, Request, RequestHandle, TokensOutput
from eventlm.sampling_params import SamplingParams, TokenLogprobs
from eventlm.scheduling_params import SchedulingParams
from eventlm.server.anthropic.messages import MESSAGES
from eventlm.server.api import Api
from eventlm.server.openai.chat import CHAT
from eventlm.server.reply_format import ReplyIdentity, StreamFormat
from eventlm.server.responses.create import RESPONSES
from eventlm.server.stream_events import StreamEvents
from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.text.generation import Generation
from eventlm.text.output_queue import OutputQueue
from eventlm.text.tools.formats import Formats, Hermes, Qwen3
from eventlm.text.tools.message import MessageFormat

FORMATS = Formats(Hermes(), Qwen3())
TOKENIZER = FakeTokenizer()
WORD = 270
CALL = '<tool_call>{"name": "add", "arguments": {"a": "%s"}}</tool_call>'
#: For those that have them.
LOGPROBS: dict[str, dict[str, Any]] = {
    "chat": {"logprobs": True, "top_logprobs": 2},
    "responses": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
}
#: By name: the API, its path, and a body that asks for a stream.
APIS: dict[str, tuple[Api[Any], str, dict[str, Any]]] = {
    "chat": (CHAT, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "responses": (RESPONSES, "/v1/responses", {"input": "hi"}),
    "messages": (MESSAGES, "/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
}


class Script(NamedTuple):
    """What the engine says, and what the reply may consist of."""

    name: str
    token_ids: list[int]
    format: MessageFormat
    has_logprobs: bool = False


def scripts(num_tokens: int) -> list[Script]:
    """The cases, of about so many tokens each."""
    words = [WORD + number % 26 for number in range(num_tokens)]
    parsed = MessageFormat(tool_names=("add",), reasoning="possible")
    third = "word " * (num_tokens // 15)
    text = f"<think>{third}</think>{third}{CALL % third}"
    return [
        Script("plain text", words, MessageFormat()),
        Script("reasoning and a call", list(text.encode()), parsed),
        Script("log-probabilities", words[: num_tokens // 4], MessageFormat(), has_logprobs=True),
    ]


def logprobs_of(token_id: int) -> TokenLogprobs:
    """Of one token, with an alternative."""
    return TokenLogprobs(logprobs=[-0.5], ranks=[1], top_ids=[[token_id, WORD]], top_logprobs=[[-0.5, -1.5]])


async def stream_seconds(name: str, script: Script) -> tuple[float, int]:
    """Processor time of one stream of an API, and how many bytes it has."""
    api, _, fields = APIS[name]
    more = LOGPROBS.get(name, {}) if script.has_logprobs else {}
    body = api.decode(msgspec.json.encode({"model": "fake", "stream": True, **fields, **more}))
    request = Request(
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(max_tokens=len(script.token_ids), logprobs=2 if script.has_logprobs else None),
        scheduling=SchedulingParams(model="fake"),
        message_format=b"" if script.format.is_plain else msgspec.msgpack.encode(script.format),
    )
    context: Any = SimpleNamespace(tokenizer=TOKENIZER, formats=FORMATS)
    queue = OutputQueue()
    handles = [RequestHandle(0, 1, lambda *_: None, lambda *_: None)]
    generation = Generation(TOKENIZER, [request], handles, queue, FORMATS, now_ns=time.monotonic_ns)
    replies = api.reply_format(context, body, [request], ReplyIdentity(f"{api.prefix}0", 0), ())
    assert isinstance(replies, StreamFormat)
    events = StreamEvents(generation, replies, has_ids=False)
    num_bytes = 0
    started = time.process_time()
    for position, token_id in enumerate(script.token_ids):
        logprobs = logprobs_of(token_id) if script.has_logprobs else None
        queue.put(0, TokensOutput(0, position, [token_id], logprobs))
        num_bytes += len(events.take(await generation.take()))
    queue.put(0, FinishedOutput(0, "eos", len(script.token_ids), cached_tokens=0))
    num_bytes += len(events.take(await generation.take())) + len(events.tail())
    return time.process_time() - started, num_bytes


async def measure(num_tokens: int, num_rounds: int) -> list[dict[str, Any]]:
    """A row for each case and API."""
    rows = []
    for script in scripts(num_tokens):
        gc.collect()
        gc.disable()
        fastest: dict[str, tuple[float, int]] = {}
        for _ in range(num_rounds):
            for name in APIS:
                found = await stream_seconds(name, script)
                fastest[name] = min(found, fastest.get(name, found))
        gc.enable()
        count = len(script.token_ids)
        rows += [
            {
                "case": script.name,
                "api": name,
                "us_per_token": seconds / count * 1e6,
                "bytes_per_token": num_bytes / count,
                "ratio": seconds / fastest["chat"][0],
            }
            for name, (seconds, num_bytes) in fastest.items()
        ]
    return rows


async def read_streams(url: str, path: str, body: dict[str, Any], num_streams: int) -> None:
    """Read so many streams at once to their ends."""
    connector = aiohttp.TCPConnector(limit=num_streams)

    async def read(session: aiohttp.ClientSession, seed: int) -> None:
        async with session.post(url + path, json={**body, "seed": seed}) as reply:
            assert reply.status == 200, await reply.text()
            async for _ in reply.content.iter_any():
                pass

    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(read(session, seed) for seed in range(num_streams)))


def measure_server(num_tokens: int, num_rounds: int, num_streams: int) -> list[dict[str, Any]]:
    """The same of a server as users start it."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from benchmarks.server.front_end_cost import Server, cpu_seconds

    fastest: dict[str, float] = {}
    limits = {"chat": "max_completion_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), 0, num_streams)
        try:
            for _ in range(num_rounds + 1):
                for name, (_, path, fields) in APIS.items():
                    body = {"model": "fake", "stream": True, "ignore_eos": True, **fields, limits[name]: num_tokens}
                    before = cpu_seconds(server.process.pid)
                    asyncio.run(read_streams(server.url, path, body, num_streams))
                    seconds = cpu_seconds(server.process.pid) - before
                    fastest[name] = min(seconds, fastest.get(name, seconds))
        finally:
            server.stop()
    count = num_tokens * num_streams
    return [
        {
            "case": "server",
            "api": name,
            "us_per_token": seconds / count * 1e6,
            "ratio": seconds / fastest["chat"],
        }
        for name, seconds in fastest.items()
    ]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--server", action="store_true")
    parser.add_argument("--streams", type=int, default=32, help="of the server at a time")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = asyncio.run(measure(arguments.tokens, arguments.rounds))
    if arguments.server:
        rows += measure_server(arguments.tokens, max(arguments.rounds // 5, 1), arguments.streams)
    print(f"{'case':<24}{'api':<12}{'us/token':>9}{'bytes/token':>13}{'of chat':>9}")
    for row in rows:
        num_bytes = f"{row['bytes_per_token']:.0f}" if "bytes_per_token" in row else ""
        print(f"{row['case']:<24}{row['api']:<12}{row['us_per_token']:>9.2f}{num_bytes:>13}{row['ratio']:>9.2f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
