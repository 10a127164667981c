"""An HTTP server over OpenVINO GenAI's continuous batching, which its package does not bring along.

    PYTHON benchmarks/peer/openvino_server.py MODEL_FOLDER [--port 9000]

PYTHON is that of the environment which benchmarks/peers.py makes. The server speaks /v1/completions with streaming, and
/health and /v1/models once the model is loaded. It is made to cost OpenVINO as little as can be: the pipeline has a
process of its own, which does nothing but step it, since a step holds Python's lock from its beginning to its end;
prompts are tokenized and tokens become text in the process that speaks HTTP, while the next step runs. The two exchange
lines of JSON, one for all tokens of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

#: Lines of the engine's process: a prompt is a few hundred tokens.
LINE_BYTES = 2**24
START_SECONDS = 300.0
#: Its default for latencies leaves the second processor of a core idle, which the other servers use.
THREADS = {"INFERENCE_NUM_THREADS": str(len(os.sched_getaffinity(0))), "ENABLE_HYPER_THREADING": "YES"}
#: With weights of 8 and 4 bits activations are quantised, in groups of so many, where the inference precision is f32
#: only; in bf16 the weights are turned back, which with int8 gave a tenth fewer tokens a second at 8 clients and a
#: third fewer in decodes.
QUANTIZED = {**THREADS, "INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "64"}
PROPERTIES = {"bf16": {**THREADS, "INFERENCE_PRECISION_HINT": "bf16"}, "int8": QUANTIZED, "int4": QUANTIZED}


class Engine:
    """The pipeline in its own process: requests come as lines, a step's tokens go as a line."""

    def __init__(self, arguments: argparse.Namespace, output: BinaryIO) -> None:
        from openvino_genai import ContinuousBatchingPipeline, SchedulerConfig

        scheduler = SchedulerConfig()
        scheduler.cache_size = arguments.cache_gb
        scheduler.max_num_batched_tokens = arguments.max_num_batched_tokens
        scheduler.max_num_seqs = arguments.max_num_seqs
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties = PROPERTIES[arguments.weights]
        self._pipeline = ContinuousBatchingPipeline(arguments.model, scheduler, "CPU", properties)
        self._handles: dict[int, Any] = {}
        self._output = output
        self._buffer = b""

    def run(self) -> None:
        """Serve until the other process closes its end."""
        self._send({"ready": True})
        while True:
            has_work = self._pipeline.has_non_finished_requests()
            if not self._take_requests(wait=not has_work):
                return
            if self._pipeline.has_non_finished_requests():
                self._pipeline.step()
            self._send_tokens()

    def _take_requests(self, *, wait: bool) -> bool:
        """Add what has come to the pipeline; False at the end of the input."""
        while select.select([0], [], [], None if wait else 0)[0]:
            data = os.read(0, LINE_BYTES)
            if not data:
                return False
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            wait = wait and not lines
        return True

    def _take(self, message: dict[str, Any]) -> None:
        if "cancel" in message:
            if (handle := self._handles.pop(message["cancel"], None)) is not None:
                handle.cancel()
            return
        import numpy
        import openvino
        from openvino_genai import GenerationConfig

        config = GenerationConfig()
        config.max_new_tokens = message["max_tokens"]
        config.ignore_eos = message["ignore_eos"]
        config.do_sample = message["temperature"] > 0
        if config.do_sample:
            config.temperature = message["temperature"]
        if not config.ignore_eos:
            config.eos_token_id = message["eos_token_id"]
        prompt = openvino.Tensor(numpy.array([message["prompt"]], dtype=numpy.int64))
        self._handles[message["id"]] = self._pipeline.add_request(message["id"], prompt, config)

    def _send_tokens(self) -> None:
        from openvino_genai import GenerationFinishReason, GenerationStatus

        tokens: list[tuple[int, list[int], str]] = []
        for number, handle in list(self._handles.items()):
            ids: list[int] = []
            reason = ""
            while handle.can_read():
                for output in handle.read().values():
                    ids += output.generated_ids
                    if output.finish_reason != GenerationFinishReason.NONE:
                        reason = "length" if output.finish_reason == GenerationFinishReason.LENGTH else "stop"
            if not reason and handle.get_status() != GenerationStatus.RUNNING:
                reason = "error"
            if reason:
                del self._handles[number]
            if ids or reason:
                tokens.append((number, ids, reason))
        if tokens:
            self._send({"tokens": tokens})

    def _send(self, message: dict[str, Any]) -> None:
        self._output.write(json.dumps(message).encode() + b"\n")
        self._output.flush()


class Step(NamedTuple):
    """Tokens that a step brought a request, and why it ended; empty while it has not."""

    token_ids: list[int]
    finish_reason: str


class Server:
    """HTTP: tokenizes, passes requests on, streams what comes back."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from tokenizers import Tokenizer

        self._arguments = arguments
        self._tokenizer = Tokenizer.from_file(str(Path(arguments.model) / "tokenizer.json"))
        config = json.loads((Path(arguments.model) / "config.json").read_text())
        self._eos_token_id = config["eos_token_id"]
        self._name = str(arguments.model)
        self._streams: dict[int, asyncio.Queue[Step]] = {}
        self._num_requests = 0
        self._engine: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Start the engine, then listen until it ends."""
        from aiohttp import web

        command = [sys.executable, __file__, *sys.argv[1:], "--role", "engine"]
        pipe = asyncio.subprocess.PIPE
        self._engine = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=LINE_BYTES)
        assert self._engine.stdout is not None
        lines = self._engine.stdout
        await asyncio.wait_for(lines.readline(), START_SECONDS)
        app = web.Application()
        for path in ("/health", "/v1/models"):
            app.router.add_get(path, self._models)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self._arguments.port).start()
        while line := await lines.readline():
            for number, token_ids, reason in json.loads(line)["tokens"]:
                if (stream := self._streams.get(number)) is not None:
                    stream.put_nowait(Step(token_ids, reason))
        raise SystemExit("the engine's process has ended")

    async def _models(self, request: Any) -> Any:
        from aiohttp import web

        return web.json_response({"object": "list", "data": [{"id": self._name, "object": "model"}]})

    async def _complete(self, request: Any) -> Any:
        from aiohttp import web

        body = await request.json()
        prompt = self._tokenizer.encode(body["prompt"]).ids
        self._num_requests += 1
        number = self._num_requests
        stream = self._streams[number] = asyncio.Queue()
        self._tell(
            id=number,
            prompt=prompt,
            max_tokens=body.get("max_tokens", 16),
            ignore_eos=body.get("ignore_eos", False),
            temperature=body.get("temperature", 1.0),
            eos_token_id=self._eos_token_id,
        )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            await self._stream(response, stream, number, len(prompt))
        except BaseException:
            self._tell(cancel=number)
            raise
        finally:
            del self._streams[number]
        return response

    async def _stream(self, response: Any, stream: asyncio.Queue[Step], number: int, num_prompt_tokens: int) -> None:
        from tokenizers.decoders import DecodeStream

        decoder = DecodeStream(skip_special_tokens=False)
        head = {"id": f"cmpl-{number}", "object": "text_completion", "created": int(time.time()), "model": self._name}
        num_tokens, reason = 0, ""
        while not reason:
            step = await stream.get()
            reason = step.finish_reason
            num_tokens += len(step.token_ids)
            text = "".join(decoder.step(self._tokenizer, token) or "" for token in step.token_ids)
            choice = {"index": 0, "text": text, "finish_reason": reason or None}
            await _send_event(response, head | {"choices": [choice]})
        usage = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
        }
        await _send_event(response, head | {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")

    def _tell(self, **message: Any) -> None:
        assert self._engine is not None
        assert self._engine.stdin is not None
        self._engine.stdin.write(json.dumps(message).encode() + b"\n")


async def _send_event(response: Any, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def main() -> int:
    """Be the server, or its engine's process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL_FOLDER", help="a model in OpenVINO's form, with its tokenizer.json")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--weights", choices=list(PROPERTIES), default="bf16")
    parser.add_argument("--cache-gb", type=int, default=1, help="memory for the KV cache")
    # Of 256, 512, 1024 and 2048 the one with most tokens a second at 8 clients, and at 32 about the best.
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024, help="of one step")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="sequences of one step")
    parser.add_argument("--role", choices=["server", "engine"], default="server", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "server":
        asyncio.run(Server(arguments).run())
        return 0
    # What libraries print must not come between the lines.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    Engine(arguments, output).run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
