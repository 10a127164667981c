"""OpenAI's Agents SDK where the server keeps the conversation: each request has only what is new."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
from agents import Agent, OpenAIConversationsSession, OpenAIResponsesModel, Runner

from tests.server.conftest import RunningServer
from tests.server.responses.test_agents import (
    TURNS,
    WITHOUT_TRACING,
    Report,
    assert_ran,
    measure,
    say_in_turn,
    to_fahrenheit,
)


@pytest.fixture
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    server = start_server(tool_parser="hermes", reasoning_parser="qwen3")
    server.engine.max_model_len = 8192
    say_in_turn(server, TURNS)
    return server


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def triage(client: openai.AsyncOpenAI) -> Agent[Any]:
    model = OpenAIResponsesModel("test", client)
    weather = Agent(
        name="weather",
        instructions="Measure, then convert.",
        model=model,
        tools=[measure, to_fahrenheit],
        output_type=Report,
    )
    return Agent(name="triage", instructions="Hand over.", model=model, handoffs=[weather])


async def test_each_response_goes_on_with_the_one_before(server: RunningServer, client: openai.AsyncOpenAI) -> None:
    result = await Runner.run(
        triage(client), "How warm is it?", run_config=WITHOUT_TRACING, auto_previous_response_id=True
    )
    assert_ran(server, result)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_responses_go_on_with_a_conversation(
    server: RunningServer, client: openai.AsyncOpenAI, is_streamed: bool
) -> None:
    conversation = await client.conversations.create()
    arguments: Any = {"run_config": WITHOUT_TRACING, "conversation_id": conversation.id}
    if is_streamed:
        result: Any = Runner.run_streamed(triage(client), "How warm is it?", **arguments)
        assert [event async for event in result.stream_events()]
    else:
        result = await Runner.run(triage(client), "How warm is it?", **arguments)
    assert_ran(server, result)
    types = [item.type async for item in client.conversations.items.list(conversation.id, order="asc")]
    assert types == [
        "message", "reasoning", "function_call", "function_call_output",
        "message", "function_call", "function_call_output", "function_call", "function_call_output",
        "reasoning", "message",
    ]  # fmt: skip


async def test_a_session_is_kept_as_a_conversation(server: RunningServer, client: openai.AsyncOpenAI) -> None:
    session = OpenAIConversationsSession(openai_client=client)
    assert_ran(server, await Runner.run(triage(client), "How warm is it?", run_config=WITHOUT_TRACING, session=session))
    items = await session.get_items()
    assert len(items) == 11
    await session.pop_item()
    assert len(await session.get_items()) == 10
    assert (await session.get_items(limit=1))[0]["type"] == "reasoning"
