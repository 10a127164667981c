"""A client process of the section `http`: `python -m benchmarks.gpu_harness.http_client` reads a `Job` in a line of
JSON, says `ready`, and on another line sends all of it at once. It prints a `Result`.
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec
import uvloop
from msgspec import Struct

from eventlm.bench.load import Load
from eventlm.bench.records import LoadRequest
from eventlm.client.openai_client import OpenAIClient

#: Of all requests.
BODY = {"ignore_eos": True, "stream_options": {"include_usage": True}}


class Job(Struct, frozen=True):
    """Prompts for a server, with the tokens to be generated for each."""

    url: str
    model: str
    prompts: list[list[int]]
    output_lens: list[int]


class Result(Struct, frozen=True):
    """Times are of the monotonic clock, which all processes of a machine share. `failure`: of the first that failed."""

    num_tokens: int
    start_ns: int
    end_ns: int
    failure: str


async def run(job: Job) -> Result:
    """Send all of it, each stream on a connection of its own."""
    bodies = [
        {"model": job.model, "prompt": prompt, "max_tokens": length, "temperature": 0.6} | BODY
        for prompt, length in zip(job.prompts, job.output_lens, strict=True)
    ]
    requests = (LoadRequest(index, body) for index, body in enumerate(bodies))
    async with OpenAIClient(job.url) as client:
        start_ns = time.monotonic_ns()
        load = await Load(client, "completions", requests).run(asyncio.Event())
    failures = [record.message or record.error for record in load.records if not record.is_success]
    num_tokens = sum(record.output_tokens for record in load.records)
    return Result(num_tokens, start_ns, start_ns + load.duration_ns, failures[0] if failures else "")


def main() -> None:
    """Do the job of the standard input."""
    job = msgspec.json.decode(sys.stdin.readline(), type=Job)
    print("ready", flush=True)
    sys.stdin.readline()
    print(msgspec.json.encode(uvloop.run(run(job))).decode(), flush=True)


if __name__ == "__main__":
    main()
