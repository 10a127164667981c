from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from eventlm.errors import PromptTooLongError, UnknownModelError
from eventlm.sampling_params import SamplingParams
from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.text.forwarding.bodies import ForwardedChatRequest, decode_forwarded
from eventlm.text.forwarding.builder import ForwardingBuilder
from eventlm.text.forwarding.piece_tokenizer import PieceTokenizer
from eventlm.text.protocol import CompletionRequest
from eventlm.text.tokenizer import Tokenizer
from tests.server.engine_double import EngineDouble, spell


class Builders:
    def __init__(self) -> None:
        self._made: list[ForwardingBuilder] = []

    def make(self, tokenizer: Tokenizer, *, max_model_len: int = 256) -> ForwardingBuilder:
        engine = EngineDouble(spell(""))
        engine.max_model_len = max_model_len
        self._made.append(
            ForwardingBuilder(engine, tokenizer, defaults=SamplingParams(), vocab_size=tokenizer.vocab_size)
        )
        return self._made[-1]

    def close(self) -> None:
        for builder in self._made:
            builder.close()


@pytest.fixture
def builders() -> Iterator[Builders]:
    found = Builders()
    yield found
    found.close()


def chat(**fields: Any) -> ForwardedChatRequest:
    raw = {"model": "test", "messages": [{"role": "user", "content": "hi"}], **fields}
    return decode_forwarded(msgspec.json.encode(raw), ForwardedChatRequest)


async def test_a_known_tokenizer_gives_the_tokens_of_its_template(builders: Builders) -> None:
    tokenizer = FakeTokenizer()
    request = await builders.make(tokenizer).chat(chat(temperature=9), 0)
    assert tokenizer.decode(request.prompt_token_ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert request.max_tokens == 256 - len(request.prompt_token_ids)


async def test_what_a_template_does_not_know_is_counted_all_the_same(builders: Builders) -> None:
    tokenizer = FakeTokenizer()
    picture = {"type": "image_url", "image_url": {"url": "data:x"}}
    request = await builders.make(tokenizer).chat(chat(messages=[{"role": "user", "content": [picture]}]), 0)
    assert tokenizer.decode(request.prompt_token_ids).startswith('\x1e["user",["')


@pytest.mark.parametrize("max_tokens", [None, 5, 60, 64, 1000])
async def test_pieces_are_cut_to_the_context(builders: Builders, max_tokens: int | None) -> None:
    builder = builders.make(PieceTokenizer(), max_model_len=64)
    long = chat(messages=[{"role": "user", "content": "x" * 1000}], max_tokens=max_tokens)
    request = await builder.chat(long, 0)
    assert len(request.prompt_token_ids) + request.max_tokens == 64
    assert request.max_tokens == min(max_tokens or 1, 63)
    [completion], _ = await builder.completions(
        CompletionRequest(model="test", prompt="x" * 1000, max_tokens=max_tokens), 0
    )
    assert len(completion.prompt_token_ids) + completion.max_tokens == 64


async def test_a_prompt_of_known_tokens_is_refused_if_it_is_too_long(builders: Builders) -> None:
    builder = builders.make(FakeTokenizer())
    with pytest.raises(PromptTooLongError):
        await builder.completions(CompletionRequest(model="test", prompt="x" * 300), 0)
    with pytest.raises(PromptTooLongError):
        await builder.chat(chat(messages=[{"role": "user", "content": "x" * 300}]), 0)


async def test_a_model_that_is_not_served(builders: Builders) -> None:
    with pytest.raises(UnknownModelError):
        await builders.make(PieceTokenizer()).chat(chat(model="other"), 0)


async def test_only_what_the_engine_needs_is_sampled_by(builders: Builders) -> None:
    body = CompletionRequest(model="test", prompt="a", stop=["x"], logprobs=2, top_k=4, temperature=0.5, n=2, seed=3)
    [request], echoes = await builders.make(PieceTokenizer()).completions(body, 0, priority=2)
    assert request.sampling == SamplingParams(n=2, seed=3, temperature=0.5, max_tokens=255)
    assert (request.scheduling.priority, request.scheduling.has_text_ends, echoes) == (2, False, [])
    assert request.forwarded is not None
    assert msgspec.json.decode(request.forwarded.body) == {
        "prompt": "a",
        "stop": ["x"],
        "logprobs": 2,
        "top_k": 4,
        "temperature": 0.5,
    }
