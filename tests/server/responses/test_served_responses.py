"""Responses of `eventlm serve`: what they say is what a chat says, streamed or not, and the trace of it verifies."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import openai

from tests.server.responses.responding import LOGPROBS
from tests.serving import serve

NUM_REQUESTS = 20
FAKE = "base_ns=200000,decode_ns=0,prefill_token_ns=0,piece_ppm=400000"


async def ask(client: openai.AsyncOpenAI, model: str, number: int) -> Any:
    """One request in three ways: a response that is whole, the last event of one that is streamed, and a chat."""
    draw = random.Random(number)
    prompt = "".join(draw.choices("abc é日🙂\n", k=draw.randint(1, 60)))
    extra: dict[str, Any] = {
        "seed": number, "ignore_eos": True, "stop": draw.choice([[], [" the"], ["🙂", ","]]),
        "min_tokens": draw.choice([0, 8]),
    }  # fmt: skip
    limit = draw.randint(8, 48)
    body: Any = {
        "model": model, "input": prompt, "max_output_tokens": limit, "extra_body": extra,
        "include": draw.choice([[], [LOGPROBS]]), "top_logprobs": 2,
    }  # fmt: skip
    whole = await client.responses.create(**body)
    last = [event async for event in await client.responses.create(**body, stream=True)][-1]
    messages: Any = [{"role": "user", "content": prompt}]
    chat = await client.chat.completions.create(
        model=model, messages=messages, max_completion_tokens=limit, logprobs=bool(body["include"]), extra_body=extra
    )
    return whole, last, chat


async def test_a_response_says_what_a_chat_says(tmp_path: Path) -> None:
    with serve(tmp_path, "--model", "fake", "--fake", FAKE, "--api-servers", "1") as server:
        async with server.async_client() as client:
            asked = [ask(client, server.model, number) for number in range(NUM_REQUESTS)]
            found = await asyncio.gather(*asked)
            assert {whole.status for whole, _, _ in found} == {"completed", "incomplete"}
            for whole, last, chat in found:
                [choice] = chat.choices
                assert whole.output_text == choice.message.content
                is_cut = choice.finish_reason == "length"
                assert whole.status == ("incomplete" if is_cut else "completed")
                assert last.type == f"response.{whole.status}"
                assert last.response.output[0].content == whole.output[0].content
                assert last.response.usage.output_tokens == whole.usage.output_tokens == chat.usage.completion_tokens
                assert whole.usage.input_tokens == chat.usage.prompt_tokens
                logprobs = choice.logprobs.content if choice.logprobs else []
                assert [entry.token for entry in whole.output[0].content[0].logprobs] == [
                    entry.token for entry in logprobs
                ]
