"""OpenAI's Agents SDK against a server: a hand-off, two tools, and an answer in a form of its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import openai
import pytest
from agents import Agent, ModelSettings, OpenAIResponsesModel, RunConfig, Runner, function_tool
from pydantic import BaseModel

from tests.server.conftest import RunningServer
from tests.server.engine_double import spell
from tests.server.responses.responding import prompt_of

WITHOUT_TRACING = RunConfig(tracing_disabled=True)


class Report(BaseModel):
    """The last answer."""

    city: str
    fahrenheit: float


@function_tool
def measure(city: str) -> float:
    """The temperature of a city in degrees Celsius."""
    return {"Zürich": 20.0}[city]


@function_tool
def to_fahrenheit(celsius: float) -> float:
    """Convert a temperature."""
    return celsius * 9 / 5 + 32


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


#: What the model says, one request after the other.
TURNS = [
    f"<think>That is one for the other.</think>{call('transfer_to_weather')}",
    f"Let me look.\n{call('measure', city='Zürich')}",
    call("to_fahrenheit", celsius=20.0),
    '<think>All is known.</think>{"city": "Zürich", "fahrenheit": 68.0}',
]


def say_in_turn(server: RunningServer, texts: Sequence[str]) -> None:
    scripts = iter([spell(text, width=4) for text in texts])
    server.engine.script = lambda request, index: next(scripts)(request, index)


@pytest.fixture
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    server = start_server(tool_parser="hermes", reasoning_parser="qwen3")
    server.engine.max_model_len = 8192
    say_in_turn(server, TURNS)
    return server


@pytest.fixture
async def triage(server: RunningServer) -> AsyncIterator[Agent[Any]]:
    """An agent that hands over to another, which has tools."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        model = OpenAIResponsesModel("test", client)
        settings = ModelSettings(store=False, response_include=["reasoning.encrypted_content"])
        weather = Agent(
            name="weather", instructions="Measure, then convert.", model=model, model_settings=settings,
            tools=[measure, to_fahrenheit], output_type=Report,
        )  # fmt: skip
        yield Agent(name="triage", instructions="Hand over.", model=model, model_settings=settings, handoffs=[weather])


def assert_ran(server: RunningServer, result: Any) -> None:
    assert result.final_output == Report(city="Zürich", fahrenheit=68.0)
    assert result.last_agent.name == "weather"
    kinds = [item.type for item in result.new_items]
    assert kinds == [
        "reasoning_item", "handoff_call_item", "handoff_output_item",
        "message_output_item", "tool_call_item", "tool_call_output_item",
        "tool_call_item", "tool_call_output_item",
        "reasoning_item", "message_output_item",
    ]  # fmt: skip
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert outputs == [20.0, 68.0]
    assert len(server.engine.requests) == len(TURNS)
    # The last prompt has all that went before, and its text is bound to the form of the answer.
    prompt = prompt_of(server)
    assert prompt.startswith("<|im_start|>system\nMeasure, then convert.")
    assert [prompt.count(text) for text in ("How warm is it?", "20.0\n</tool_response>", "68.0\n</tool_response>")] == [
        1, 1, 1,
    ]  # fmt: skip
    assert "fahrenheit" in server.engine.requests[-1].sampling.grammar
    usage = result.context_wrapper.usage
    assert usage.requests == len(TURNS)
    assert usage.output_tokens == sum(len(text.encode()) for text in TURNS)
    assert usage.output_tokens_details.reasoning_tokens > 0


async def test_an_agent_with_two_tools_and_a_hand_off(server: RunningServer, triage: Agent[Any]) -> None:
    assert_ran(server, await Runner.run(triage, "How warm is it?", run_config=WITHOUT_TRACING))


async def test_the_same_streamed(server: RunningServer, triage: Agent[Any]) -> None:
    result = Runner.run_streamed(triage, "How warm is it?", run_config=WITHOUT_TRACING)
    raw = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
    assert_ran(server, result)
    assert raw.count("response.completed") == raw.count("response.created") == len(TURNS)
    assert {"response.reasoning_text.delta", "response.function_call_arguments.done"} <= set(raw)
