"""Log-probabilities in replies: through the openai client, streamed and whole, of the prompt and of the output."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest

from eventlm.engine.request import FinishedOutput, Request
from eventlm.sampling_params import SamplingParams, TokenLogprobs
from eventlm.scheduling_params import SchedulingParams
from eventlm.server.openai.completions import CompletionReplies
from eventlm.server.reply_format import ReplyIdentity
from eventlm.text.choice_output import ChoiceOutput
from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.text.generation import Generation
from eventlm.text.output_queue import OutputQueue
from eventlm.text.protocol import CompletionRequest
from tests.server.conftest import INVALID, RunningServer, assert_error
from tests.server.engine_double import spell

MESSAGES: Any = [{"role": "user", "content": "hi"}]
#: A token of several characters' parts, one that is cut, minus infinity, and a special token.
TOKENS = [104, 0xF0, 0x9F, 0x99, 0x82, 33, 0, 257]


@pytest.fixture
def client(server: RunningServer):
    server.engine.script = lambda request, index: [TOKENS[:2], TOKENS[2:5], TOKENS[5:]]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="test", messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content
    assert content is not None
    replaced = "\N{REPLACEMENT CHARACTER}"
    assert [token.token for token in content] == ["h", *[replaced] * 4, "!", "\0", "<|eos|>"]
    # Bytes join to the text where tokens cut its characters.
    assert bytes(byte for token in content for byte in token.bytes or []) == "h🙂!\0<|eos|>".encode()
    assert [token.logprob for token in content[-3:]] == [-0.33, -9999.0, -2.57]
    assert [[(top.token, top.logprob, top.bytes) for top in token.top_logprobs] for token in content] == [
        [(" ", -0.32, [32]), ("!", -0.33, [33])]
    ] * 8


def test_chat_without_alternatives(server: RunningServer, client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="test", messages=MESSAGES, logprobs=True)
    assert reply.choices[0].logprobs is not None
    assert [token.top_logprobs for token in reply.choices[0].logprobs.content or []] == [[]] * 8
    assert server.engine.requests[0].sampling.logprobs == 0
    assert server.chat(top_logprobs=0).json()["choices"][0]["logprobs"] is None


def test_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="test", prompt="hi", logprobs=1)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert (logprobs.tokens[0], logprobs.tokens[-1]) == ("h", "<|eos|>")
    assert logprobs.token_logprobs == [-1.04, -2.4, -1.59, -1.53, -1.3, -0.33, -9999.0, -2.57]
    assert logprobs.text_offset == [0, 1, 1, 1, 1, 2, 3, 4]
    # Up to one more than was asked for: the token itself is always there.
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"h": -1.04, " ": -0.32}
    assert reply.choices[0].text == "h🙂!\0"


@pytest.mark.parametrize("stop", [None, "h🙂", "!", "nowhere", "🙂!"])
def test_streamed_logprobs_join_to_the_whole_ones(server: RunningServer, client: openai.OpenAI, stop: Any) -> None:
    server.engine.script = spell("oh🙂!oh", width=3)
    fields: Any = {"model": "test", "messages": MESSAGES, "logprobs": True, "top_logprobs": 3, "stop": stop}
    whole = client.chat.completions.create(**fields).choices[0]
    assert whole.logprobs is not None
    streamed, shown = [], 0
    for chunk in client.chat.completions.create(**fields, stream=True):
        [choice] = chunk.choices
        if choice.logprobs is not None:
            streamed += choice.logprobs.content or []
        shown += len((choice.delta.content or "").encode())
        # No text without its tokens.
        assert shown <= sum(len(token.bytes or []) for token in streamed)
    assert streamed == whole.logprobs.content
    plain: Any = {"model": "test", "prompt": "hi", "logprobs": 2, "stop": stop, "n": 2}
    joined: list[dict[str, list[Any]]] = [{}, {}]
    for completion in client.completions.create(**plain, stream=True):
        [part] = completion.choices
        for name, values in (part.logprobs.model_dump() if part.logprobs else {}).items():
            joined[part.index].setdefault(name, []).extend(values)
    for choice in client.completions.create(**plain).choices:
        assert choice.logprobs is not None
        assert choice.logprobs.model_dump() == joined[choice.index]


def test_prompt_logprobs(server: RunningServer) -> None:
    hello, same = (choice["prompt_logprobs"] for choice in server.complete(
        prompt="hello", prompt_logprobs=1, n=2
    ).json()["choices"])  # fmt: skip
    single, pair = (choice["prompt_logprobs"] for choice in server.complete(
        prompt=[[5], [7, 0]], prompt_logprobs=1
    ).json()["choices"])  # fmt: skip
    assert same == hello
    assert hello[0] is None
    assert len(hello) == 6  # with its <|bos|>
    assert hello[1] == {
        "104": {"logprob": -1.04, "rank": 105, "decoded_token": "h"},
        "32": {"logprob": -0.32, "rank": 1, "decoded_token": " "},
    }
    assert single == [None]
    assert pair[1]["0"]["logprob"] == -9999.0
    assert [request.scheduling.skip_cache_read for request in server.engine.requests] == [True] * 3
    chat = server.chat(prompt_logprobs=0).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in chat["prompt_logprobs"][1:])
    assert server.chat().json()["prompt_logprobs"] is None
    assert server.complete().json()["choices"][0]["prompt_logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_stop_reason(server: RunningServer, stream: bool) -> None:
    def reasons(**fields: Any) -> list[Any]:
        if not stream:
            return [call(**fields).json()["choices"][0] for call in (server.chat, server.complete)]
        return [call(stream=True, **fields).events()[-2]["choices"][0] for call in (server.chat, server.complete)]

    for choice in reasons(stop=["nowhere", "wor"]):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "wor")
    for choice in reasons():
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    server.engine.script_end = "stop_token"
    for choice in reasons(stop_token_ids=[ord("d")]):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ord("d"))


async def test_the_loop_runs_on_while_a_reply_of_many_choices_is_written() -> None:
    num_choices = 20
    tokenizer = FakeTokenizer()
    group = [
        Request(
            prompt_token_ids=[97], sampling=SamplingParams(n=num_choices), scheduling=SchedulingParams(model="test")
        )
    ]
    body = CompletionRequest(model="test", prompt="a", n=num_choices, logprobs=0)
    replies = CompletionReplies(body, tokenizer, group, ReplyIdentity("cmpl-1", 0), [])
    logprobs = TokenLogprobs(logprobs=[-1.0], ranks=[1], top_ids=[[]], top_logprobs=[[]])
    end = FinishedOutput(0, "length", 1, 0)
    outputs = [ChoiceOutput(choice, "b", [98], logprobs, finished=end) for choice in range(num_choices)]
    generation = Generation(tokenizer, group, [], OutputQueue(), now_ns=time.monotonic_ns)
    writing = asyncio.create_task(replies.whole(outputs, generation))
    num_turns = 0
    while not writing.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert [choice.index for choice in writing.result().choices] == list(range(num_choices))
    assert num_turns >= num_choices


def test_what_the_engine_gets(server: RunningServer, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model="test", messages=MESSAGES, presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={"7": -100, "8": 5.5},
        max_tokens=9, stop="x",
        extra_body={
            "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 3, "allowed_token_ids": [5, 6],
            "bad_words": ["the", " of"], "include_stop_str_in_output": True, "skip_special_tokens": False,
        },
    )  # fmt: skip
    [request] = server.engine.requests
    params = request.sampling
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -0.5, 1.2)
    assert (params.min_p, params.min_tokens, params.allowed_token_ids) == (0.1, 3, [5, 6])
    assert params.logit_bias == {7: -100.0, 8: 5.5}
    # This tokenizer has one token a byte: behind a space a word is longer, and is found without it.
    assert params.bad_words_token_ids == (tuple(b"the"), tuple(b"of"))
    assert (request.sampling.include_stop_str_in_output, request.sampling.skip_special_tokens) == (True, False)
    assert (params.logprobs, params.prompt_logprobs, request.scheduling.skip_cache_read) == (None, None, False)


def test_log_probabilities_of_named_tokens(server: RunningServer) -> None:
    """vLLM's `logprob_token_ids`: the output's own token, then the named ones, whatever is most likely."""
    server.engine.script = spell("He")
    named = {"logprob_token_ids": [5, 72, 9, 5], "return_tokens_as_token_ids": True}
    entries = server.chat(logprobs=True, top_logprobs=1, **named).json()["choices"][0]["logprobs"]["content"]
    assert [[(top["token"], top["logprob"]) for top in entry["top_logprobs"]] for entry in entries] == [
        [("token_id:72", -0.72), ("token_id:5", -0.05), ("token_id:9", -0.09)],
        [("token_id:101", -1.01), ("token_id:5", -0.05), ("token_id:72", -0.72), ("token_id:9", -0.09)],
    ]
    [_, *chunks, _, _] = server.chat(logprobs=True, stream=True, **named).events()
    streamed = [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert streamed == entries
    completion = server.complete(logprobs=0, echo=True, **named).json()["choices"][0]["logprobs"]
    assert [sorted(top) for top in completion["top_logprobs"][-2:]] == [
        ["token_id:5", "token_id:72", "token_id:9"],
        ["token_id:101", "token_id:5", "token_id:72", "token_id:9"],
    ]
    # Those of the prompt are as many as `logprobs` says.
    assert [len(top or ()) for top in completion["top_logprobs"][:-2]] == [0, 1, 1]
    sampling = server.engine.requests[0].sampling
    assert (sampling.logprob_token_ids, sampling.logprobs) == ([5, 72, 9], 1)


@pytest.mark.parametrize(
    ("path", "fields", "code", "message"),
    [
        ("chat", {}, "invalid_value", "only allowed when 'logprobs' is set"),
        ("chat", {"logprobs": False}, "invalid_value", "only allowed when 'logprobs' is set"),
        ("complete", {}, "invalid_value", "only allowed when 'logprobs' is set"),
        ("complete", {"echo": True, "max_tokens": 0, "logprobs": 1}, "invalid_value", "when there is any output"),
        ("chat", {"logprobs": True, "logprob_token_ids": []}, "invalid_value", "it must not be empty"),
        ("chat", {"logprobs": True, "logprob_token_ids": 5}, "invalid_type", "got `int`"),
    ],
)
def test_tokens_that_cannot_be_named(
    server: RunningServer, path: str, fields: dict[str, Any], code: str, message: str
) -> None:
    reply = getattr(server, path)(**({"logprob_token_ids": [5]} | fields))
    assert_error(reply, 400, INVALID, "logprob_token_ids", code, message=message)
