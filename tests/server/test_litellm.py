"""litellm's client over both APIs. Skipped without the package, which is large."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eventlm.engine.request import Request
from tests.processes import PATIENCE_SECONDS
from tests.server.conftest import RunningServer
from tests.server.tool_calls import WEATHER

litellm = pytest.importorskip("litellm")
pytestmark = pytest.mark.soak

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How is the weather in Bern?"}]


@pytest.fixture
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    server = start_server(reasoning_parser="qwen3")
    server.engine.max_model_len = 8192

    def say(request: Request, index: int) -> list[list[int]]:
        is_answered = "<tool_response>" in server.context.tokenizer.decode(request.prompt_token_ids)
        text = "It is 20 degrees." if is_answered else f"<think>Hm.</think>Let me see.\n{CALL}"
        return [[byte] for byte in text.encode()]

    server.engine.script = say
    return server


@pytest.mark.parametrize(("provider", "path", "prefix"), [("anthropic", "", "toolu_"), ("openai", "/v1", "call_")])
def test_tools_and_streams(server: RunningServer, provider: str, path: str, prefix: str) -> None:
    def complete(messages: list[Any], model: str = "test", **fields: Any) -> Any:
        return litellm.completion(
            model=f"{provider}/{model}",
            api_base=server.url + path,
            api_key="none",
            max_tokens=300,
            messages=messages,
            tools=[WEATHER],
            timeout=PATIENCE_SECONDS,
            **fields,
        )

    [choice] = complete(MESSAGES).choices
    [call] = choice.message.tool_calls
    assert (choice.message.content, choice.message.reasoning_content) == ("Let me see.", "Hm.")
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Bern"}')
    assert call.id.startswith(prefix)
    assert choice.finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "20"}
    answered = complete([*MESSAGES, choice.message.model_dump(), result])
    assert answered.choices[0].message.content == "It is 20 degrees."
    assert answered.usage.completion_tokens == len("It is 20 degrees.")

    streamed = litellm.stream_chunk_builder(list(complete(MESSAGES, stream=True)))
    assert streamed.choices[0].message.content == "Let me see."
    assert streamed.choices[0].message.tool_calls[0].function == call.function
    with pytest.raises(litellm.NotFoundError, match="nope"):
        complete(MESSAGES, "nope")
