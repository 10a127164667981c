"""`eventlm serve --backend` in front of servers that people run: each alone, and pairs of which one dies or stalls."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import openai
import pytest

from eventlm.config.backends import BackendSpec
from eventlm.engine.backend import AnswerDelta
from eventlm.events import Finished, Forwarded, ForwardFailed
from eventlm.gateway.client import HttpBackend
from tests.gateway.real_servers import CONTEXT_TOKENS, MODEL, NAMES, RealServer, ServerName, real_servers
from tests.gateway.requests import answer, attempt, failure, forwarded
from tests.processes import until
from tests.server.tool_calls import WEATHER
from tests.serving import CLIENT_SETTINGS, Server, serve

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

FLAGS = ("--probe-interval-ms", "100", "--silence-timeout-seconds", "60")
MESSAGES: Any = [{"role": "user", "content": "Which is the capital of France? Then name three of its rivers."}]
PROMPT = "Once upon a time, in a village by the sea,"
#: Parameters that these servers refuse, and only they.
REFUSED: dict[ServerName, dict[str, Any]] = {
    "llama.cpp": {"grammar": "root ::= ("},
    "eventlm": {"temperature": -3},
    "vllm": {"temperature": -3},
}
#: "1, 2, 3, 4, 5,"
TOKEN_IDS = [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28]
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "age": {"type": "integer"}},
    "required": ["city", "age"],
    "additionalProperties": False,
}


class Front(NamedTuple):
    """A server, and the gateway before it."""

    server: RealServer
    gateway: Server

    @property
    def clients(self) -> tuple[openai.OpenAI, openai.OpenAI]:
        """Of the server itself, and of the gateway."""
        return openai.OpenAI(base_url=f"{self.server.url}/v1", **CLIENT_SETTINGS), self.gateway.client()


@pytest.fixture(scope="module", params=NAMES)
def front(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("front")
    with real_servers(folder, request.param) as [server], serve(folder, "--backend", server.url, *FLAGS) as gateway:
        yield Front(server, gateway)


@pytest.fixture
def whole_front(front: Front) -> Front:
    """One of a server with all of the API."""
    if front.server.name == "openvino":
        pytest.skip("it has streams of completions alone")
    return front


class Answer(NamedTuple):
    """What a client gets of one choice."""

    text: str
    reason: str | None
    usage: tuple[int, int]


def complete(client: openai.OpenAI, model: str, *, is_stream: bool, **fields: Any) -> Answer:
    """A greedy answer to a chat or a prompt."""
    fields |= {"model": model, "temperature": 0, "max_tokens": 40}
    create: Any = client.chat.completions.create if "messages" in fields else client.completions.create
    if not is_stream:
        reply = create(**fields)
        [choice] = reply.choices
        text = choice.message.content if "messages" in fields else choice.text
        return Answer(text, choice.finish_reason, (reply.usage.prompt_tokens, reply.usage.completion_tokens))
    text, reason, usage = "", None, (0, 0)
    for chunk in create(**fields, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            text += (choice.delta.content if "messages" in fields else choice.text) or ""
            reason = choice.finish_reason or reason
        if chunk.usage is not None:
            usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
    return Answer(text, reason, usage)


@asynccontextmanager
async def connected(server: RealServer) -> AsyncIterator[HttpBackend]:
    client = HttpBackend(BackendSpec(url=server.url))
    try:
        await client.ask()
        yield client
    finally:
        await client.close()


async def is_idle(client: HttpBackend) -> bool:
    load = await client.read_load()
    assert load is not None
    return (load.running, load.waiting) == (0, 0)


async def wait_until_idle(client: HttpBackend) -> None:
    async with asyncio.timeout(60):
        while not await is_idle(client):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_facts_and_load(front: Front) -> None:
    async with connected(front.server) as client:
        facts = client.facts
        if front.server.name == "openvino":
            assert (facts.kind, await client.read_load()) == ("openai", None)
            return
        assert facts.kind == front.server.name.replace(".", "")
        assert facts.models == [MODEL]
        assert facts.max_model_len == CONTEXT_TOKENS
        assert facts.version
        assert facts.cache_tokens >= CONTEXT_TOKENS
        await wait_until_idle(client)
        async with aclosing(
            client.forward(attempt({"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True}))
        ) as items:
            await anext(items)
            load = await client.read_load()
            assert load is not None
            assert (load.running, load.waiting) == (1, 0)
        await wait_until_idle(client)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("fields", [{"messages": MESSAGES}, {"prompt": PROMPT}], ids=["chat", "completion"])
def test_answers_are_the_servers_own(front: Front, fields: dict[str, Any], *, is_stream: bool) -> None:
    if front.server.name == "openvino" and ("messages" in fields or not is_stream):
        pytest.skip("it has streams of completions alone")
    direct, through = front.clients
    model = front.gateway.model
    expected = complete(direct, model, is_stream=is_stream, **fields)
    assert len(expected.text) > 20
    assert complete(through, model, is_stream=is_stream, **fields) == expected


def test_log_probabilities(whole_front: Front) -> None:
    direct, through = whole_front.clients
    fields: Any = {"model": MODEL, "temperature": 0, "max_tokens": 5}
    chats = [
        client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **fields).choices[0]
        for client in (direct, through)
    ]
    found = [chat.logprobs.content or [] for chat in chats if chat.logprobs is not None]
    assert [[token.token for token in each] for each in found] == [[token.token for token in found[0]]] * 2
    assert len(found[1]) == 5
    for left, right in zip(*found, strict=True):
        assert left.logprob == pytest.approx(right.logprob, abs=0.05)
        assert len(right.top_logprobs) == 2
    completion = through.completions.create(prompt=PROMPT, logprobs=2, **fields).choices[0]
    assert completion.logprobs is not None
    assert completion.logprobs.tokens is not None
    assert "".join(completion.logprobs.tokens) == completion.text


def test_several_choices(whole_front: Front) -> None:
    direct, through = whole_front.clients
    fields: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 20}
    one = direct.chat.completions.create(temperature=0, **fields)
    two = through.chat.completions.create(temperature=0, n=2, **fields)
    assert [choice.message.content for choice in two.choices] == [one.choices[0].message.content] * 2
    assert one.usage is not None
    assert two.usage is not None
    assert two.usage.prompt_tokens == one.usage.prompt_tokens
    assert two.usage.completion_tokens == 2 * one.usage.completion_tokens
    drawn = through.chat.completions.create(temperature=1.5, n=2, seed=5, **fields)
    assert len({choice.message.content for choice in drawn.choices}) == 2


@pytest.mark.parametrize("is_stream", [False, True])
def test_structured_output(whole_front: Front, *, is_stream: bool) -> None:
    schema_format = {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA}}
    for client in whole_front.clients:
        answer = complete(client, MODEL, is_stream=is_stream, messages=MESSAGES, response_format=schema_format)
        assert json.loads(answer.text)["city"] in ("Paris", "Rome")
        assert answer.reason == "stop"


def test_tools(whole_front: Front) -> None:
    messages: Any = [{"role": "user", "content": "How is the weather in Bern?"}]
    fields: Any = {"model": MODEL, "messages": messages, "tools": [WEATHER], "tool_choice": "required"}
    fields |= {"temperature": 0, "max_tokens": 60, "parallel_tool_calls": False}
    direct, through = (client.chat.completions for client in whole_front.clients)
    found = []
    for chats in (direct, through):
        message: Any = chats.create(**fields).choices[0].message
        found.append(
            (
                message.content or "",
                [(call.function.name, call.function.arguments) for call in message.tool_calls or []],
            )
        )
    content, calls = found[1]
    assert found[0] == found[1]
    # With this model's template llama.cpp does not tell the model of tools.
    if whole_front.server.name != "llama.cpp":
        [(name, arguments)] = calls
        assert name == "get_weather"
        assert "Bern" in arguments
    deltas: Any = [choice.delta for chunk in through.create(**fields, stream=True) for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == content
    parts = [part.function.arguments or "" for delta in deltas for part in delta.tool_calls or []]
    assert "".join(parts) == "".join(arguments for _, arguments in calls)


def test_refusals_are_the_servers_own(whole_front: Front) -> None:
    for fields in (REFUSED[whole_front.server.name], {"messages": [{"role": "user", "content": "a b c d " * 2000}]}):
        errors = []
        for client in whole_front.clients:
            with pytest.raises(openai.APIStatusError) as caught:
                client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=fields)
            errors.append(caught.value)
        direct, through = errors
        assert through.status_code == direct.status_code
        assert " ".join(through.body["message"].split()) == " ".join(direct.body["message"].split())  # type: ignore[index]
        assert through.body.keys() == {"message", "type", "param", "code"}  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["chat", "completion", "token ids"])
async def test_an_answer_goes_on_where_it_broke_off(whole_front: Front, kind: str) -> None:
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    if kind == "chat":
        body["messages"] = [{"role": "user", "content": "Count to a hundred: 1, 2, 3, 4, 5, 6, and so on."}]
    else:
        body["prompt"] = count_from(1)["prompt"]
    if kind == "token ids":
        body |= {"prompt": TOKEN_IDS, "return_token_ids": True}
    async with connected(whole_front.server) as client:
        assert client.can_continue(forwarded(body))
        whole, deltas, ended = await answer(client, body)
        shown: list[AnswerDelta] = []
        while sum(delta.num_tokens for delta in shown) < 10:
            shown.append(deltas.pop(0))
        num_tokens = sum(delta.num_tokens for delta in shown)
        begun = "".join(delta.text for delta in shown)
        token_ids = [token_id for delta in shown for token_id in delta.token_ids] if kind == "token ids" else []
        more: dict[str, Any] = {"text": begun, "token_ids": token_ids, "num_tokens": num_tokens}
        if kind == "token ids" and not token_ids:
            error, text = await failure(client, body, **more)
            assert (error.kind, text, whole_front.server.name) == ("refused", "", "llama.cpp")
            return
        rest, _, end = await answer(client, body, **more)
    assert begun + rest == whole
    assert (end.reason, end.usage.completion) == (ended.reason, 40 - num_tokens)


async def test_a_client_that_leaves_frees_the_server(whole_front: Front) -> None:
    client = whole_front.gateway.async_client()
    async with connected(whole_front.server) as backend:
        stream = await client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        assert not await is_idle(backend)
        await stream.close()
        await wait_until_idle(backend)


PAIRS: list[tuple[ServerName, ServerName]] = [("llama.cpp", "llama.cpp"), ("eventlm", "llama.cpp")]
NUM_STREAMS = 6
DISTURBED = ("--silence-timeout-seconds", "2", "--forward-retries", "5", "--retry-budget-percent", "100")


def count_from(number: int) -> dict[str, Any]:
    """A request whose answer is the same however the arithmetic is rounded."""
    start = 100 * (number + 2)
    prompt = f"Count:\n{start}\n{start + 1}\n{start + 2}\n{start + 3}\n{start + 4}\n"
    return {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 120}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("pair", PAIRS, ids=["-".join(pair) for pair in PAIRS])
async def test_one_of_two_dies_or_stalls(
    tmp_path: Path, pair: tuple[ServerName, ServerName], number: signal.Signals
) -> None:
    """Every answer is whole: begun answers go on at the other server."""
    with real_servers(tmp_path, *pair) as [first, second]:
        specs = [part for each in (first, second) for part in ("--backend", each.url)]
        gateway = Server(tmp_path, *specs, *FLAGS, *DISTURBED, "--router", "round_robin")
        try:
            await asyncio.to_thread(gateway.wait_ready)
            through = gateway.async_client()
            direct = openai.AsyncOpenAI(base_url=f"{second.url}/v1", **CLIENT_SETTINGS)
            expected = [
                (await direct.completions.create(**count_from(each))).choices[0].text for each in range(NUM_STREAMS)
            ]
            texts = [""] * NUM_STREAMS

            async def ask(each: int) -> None:
                stream = await through.completions.create(**count_from(each), stream=True)
                async for chunk in stream:
                    texts[each] += chunk.choices[0].text if chunk.choices else ""

            async def disturb() -> None:
                await until(lambda: all(len(text) > 20 for text in texts))
                first.signal(number)
                if number == signal.SIGSTOP:
                    await asyncio.sleep(5)
                    first.signal(signal.SIGCONT)

            async with asyncio.timeout(300):
                await asyncio.gather(disturb(), *(ask(each) for each in range(NUM_STREAMS)))
            trace = await asyncio.to_thread(gateway.stop_and_verify)
        finally:
            gateway.close()
    assert texts == expected
    assert Counter(each.reason for each in trace.of(Finished)) == {"length": NUM_STREAMS}
    failed = Counter(each.kind for each in trace.of(ForwardFailed))
    assert failed == {"broken" if number == signal.SIGKILL else "timeout": NUM_STREAMS // 2}
    assert len(trace.of(Forwarded)) == NUM_STREAMS + failed.total()


async def test_prefixes_go_where_they_are_cached(tmp_path: Path) -> None:
    """By llama.cpp's own counts: each prefix is computed at one server, once."""
    prefixes = [f"Story {number}. " + " ".join(f"{number}{word}" for word in range(100, 300)) for number in range(4)]
    turns = [(group, turn) for group in range(4) for turn in range(6)]
    random.Random(1).shuffle(turns)
    sizes, cached = [0] * 4, 0
    with real_servers(tmp_path, "llama.cpp", "llama.cpp") as servers:
        specs = [part for each in servers for part in ("--backend", each.url)]
        with serve(tmp_path, *specs, *FLAGS, "--router", "prefix_affinity") as gateway:
            client = gateway.async_client()
            for group, turn in turns:
                prompt = f"{prefixes[group]} Question {turn}:"
                reply = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
                assert reply.usage is not None
                assert reply.usage.prompt_tokens_details is not None
                sizes[group] = reply.usage.prompt_tokens
                cached += reply.usage.prompt_tokens_details.cached_tokens or 0
        counts = [await count_cached(each) for each in servers]
    assert sum(counts) == cached
    assert min(counts) > 0
    assert cached >= 0.9 * sum(size * 5 for size in sizes)


async def count_cached(server: RealServer) -> int:
    """Prompt tokens that it found in its cache."""
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    [line] = [line for line in lines if line.startswith("llamacpp:prompt_tokens_cached_total ")]
    return int(line.split()[1])
