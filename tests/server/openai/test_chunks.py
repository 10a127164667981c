"""Streamed text is the whole text: 500 random prompts through a real server, with tokens that cut characters and stop
strings that cut tokens, against the text by its definition.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.worker.fake.tokens import fake_token
from tests.serving import Server

NUM_PROMPTS = 500
PIECE_PPM = 400_000
TOKENIZER = FakeTokenizer()


class Case(NamedTuple):
    """A request, and what its answer is by definition."""

    endpoint: str
    body: dict[str, Any]
    text: str
    num_tokens: int
    stop_reason: str | None


class Answer(NamedTuple):
    """What came, streamed or not. `logprobs` has what belongs to each token."""

    text: str
    num_tokens: int
    finish_reason: str
    stop_reason: str | None
    logprobs: list[Any]


def decode(token_ids: list[int]) -> str:
    return b"".join(map(TOKENIZER.token_bytes, token_ids)).decode(errors="replace")


def make_case(model: str, number: int) -> Case:
    draw = random.Random(number)
    seed, max_tokens = draw.randrange(2**32), draw.randint(1, 48)
    token_ids = [fake_token(seed, 0, index, piece_ppm=PIECE_PPM) for index in range(max_tokens)]
    whole = decode(token_ids)
    # Most occur, somewhere in the text and across the borders of its tokens.
    starts = [draw.randrange(len(whole)) for _ in range(draw.choice([0, 1, 1, 3]))]
    stops = [whole[start : start + draw.randint(1, 6)] for start in starts] + ["nowhere"] * draw.randint(0, 1)
    min_tokens = draw.choice([0, 0, max_tokens // 2])
    include_stop = draw.random() < 0.3
    body: dict[str, Any] = {
        "model": model,
        "seed": seed,
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "stop": stops,
        "include_stop_str_in_output": include_stop,
        "ignore_eos": True,
    }
    prompt = "".join(draw.choices("abc é日🙂\n", k=draw.randint(1, 60)))
    if draw.random() < 0.5:
        endpoint = "chat/completions"
        body |= {"messages": [{"role": "user", "content": prompt}]}
        body |= draw.choice([{}, {"logprobs": True, "top_logprobs": 2}])
    else:
        endpoint = "completions"
        body |= {"prompt": prompt} | draw.choice([{}, {"logprobs": 2}])
    return Case(endpoint, body, *expected(token_ids, stops, min_tokens, include_stop=include_stop))


def expected(
    token_ids: list[int], stops: list[str], min_tokens: int, *, include_stop: bool
) -> tuple[str, int, str | None]:
    """The text, its tokens and its stop: the first character behind `min_tokens` tokens at which a stop is complete."""
    shown = 0
    for num_tokens in range(1, len(token_ids) + 1):
        # A character that is not complete is not text yet, except at the end.
        known = decode(token_ids) if num_tokens == len(token_ids) else complete(token_ids[:num_tokens])
        for end in range(shown + 1, len(known) + 1) if stops and num_tokens > min_tokens else ():
            found = [stop for stop in stops if known[:end].endswith(stop)]
            if found:
                stop = max(found, key=len)
                return known[: end if include_stop else end - len(stop)], num_tokens, stop
        shown = len(known)
    return decode(token_ids), len(token_ids), None


def complete(token_ids: list[int]) -> str:
    """The text without a character that further bytes could complete."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(map(TOKENIZER.token_bytes, token_ids)))


async def ask(session: aiohttp.ClientSession, case: Case) -> Answer:
    async with session.post(f"/v1/{case.endpoint}", json=case.body) as response:
        reply = await response.json()
        assert response.status == 200, reply
    [choice] = reply["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return Answer(
        text,
        reply["usage"]["completion_tokens"],
        choice["finish_reason"],
        choice["stop_reason"],
        by_token(choice["logprobs"]),
    )


async def ask_streamed(session: aiohttp.ClientSession, case: Case) -> Answer:
    body = case.body | {"stream": True, "stream_options": {"include_usage": True}}
    async with session.post(f"/v1/{case.endpoint}", json=body) as response:
        lines = (await response.read()).decode().split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]
    *chunks, last = chunks
    text, logprobs = "", []
    for chunk in chunks:
        [choice] = chunk["choices"]
        piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        text += piece
        logprobs += by_token(choice["logprobs"])
        if "logprobs" in body and piece:
            # No text without the tokens that it is of.
            assert len(text) <= sum(len(token_bytes(entry)) for entry in logprobs)
    end = chunks[-1]["choices"][0]
    return Answer(text, last["usage"]["completion_tokens"], end["finish_reason"], end["stop_reason"], logprobs)


def token_bytes(entry: Any) -> bytes:
    return bytes(entry["bytes"]) if isinstance(entry, dict) else entry[0].encode()


def by_token(logprobs: dict[str, Any] | None) -> list[Any]:
    """One entry a token, whatever the endpoint."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    return list(zip(*logprobs.values(), strict=True))


async def test_500_random_prompts(tmp_path: Path) -> None:
    parameters = f"base_ns=200000,decode_ns=0,prefill_token_ns=0,piece_ppm={PIECE_PPM}"
    server = Server(tmp_path, "--model", "fake", "--fake", parameters).wait_ready()
    try:
        cases = [make_case(server.model, number) for number in range(NUM_PROMPTS)]
        gate = asyncio.Semaphore(16)

        async def check(session: aiohttp.ClientSession, case: Case) -> None:
            async with gate:
                whole, streamed = await asyncio.gather(ask(session, case), ask_streamed(session, case))
            assert streamed == whole
            assert (whole.text, whole.num_tokens, whole.stop_reason) == case[2:], case.body
            assert whole.finish_reason == ("length" if case.stop_reason is None else "stop")
            assert len(whole.logprobs) == (whole.num_tokens if "logprobs" in case.body else 0)

        async with aiohttp.ClientSession(server.url) as session:
            await asyncio.gather(*(check(session, case) for case in cases))
        assert server.stop() == 0
    finally:
        server.close()
    # The cases are what they are meant to be.
    stopped = [case for case in cases if case.stop_reason is not None]
    assert len(stopped) > NUM_PROMPTS / 4
    assert sum("�" in case.text for case in cases) > 10
    assert sum(case.num_tokens < len(case.text.encode()) for case in cases) > NUM_PROMPTS / 4
