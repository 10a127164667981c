"""What the engine refuses before it reaches a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from eventlm.config import CacheConfig
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.request import TokenIdError
from eventlm.engine.request_check import check_request
from eventlm.errors import UsageError
from eventlm.events import Arrived, Finished
from tests.engine.engines import fake_setup, generate, recorded, request


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"stop_token_ids": (1, 9)}, "stop_token_ids"),
        ({"allowed_token_ids": (9,)}, "allowed_token_ids"),
        ({"bad_words": ((1, 2), (3, 9))}, "bad_words"),
        ({"logit_bias": ((9, 1.0),)}, "logit_bias"),
    ],
)
def test_ids_that_the_model_does_not_have(params: dict[str, Any], name: str) -> None:
    wrong = request()
    wrong = structs.replace(wrong, params=structs.replace(wrong.params, **params))
    with pytest.raises(TokenIdError, match=f"{name} has the token id 9, .*from 0 to 8"):
        check_request(wrong, max_model_len=64, vocab_size=9)
    check_request(wrong, max_model_len=64, vocab_size=10)
    check_request(wrong, max_model_len=64, vocab_size=0)


@pytest.mark.parametrize(("prompt", "wrong"), [([1, 9, 2], 9), ([1, -1, 9], -1)])
def test_a_prompt_of_ids_that_the_model_does_not_have(prompt: list[int], wrong: int) -> None:
    with pytest.raises(TokenIdError, match=f"the prompt has the token id {wrong},"):
        check_request(request(prompt=prompt), max_model_len=64, vocab_size=9)
    with pytest.raises(TokenIdError, match="0 and above"):
        check_request(request(prompt=[-1]), max_model_len=64, vocab_size=0)


@pytest.mark.parametrize("name", ["cache_salt", "adapter"])
def test_text_that_cannot_be_hashed(name: str) -> None:
    wrong = request(**{name: "a\ud800"})
    with pytest.raises(UsageError, match=f"{name} is not valid text: it has a lone surrogate at 1"):
        check_request(wrong, max_model_len=64, vocab_size=9)


@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_without_a_prefix_cache_nothing_is_hit(tmp_path: Path, prefix_cache: bool) -> None:
    setup = fake_setup(record=tmp_path)
    config = structs.replace(setup.config, cache=CacheConfig(prefix_cache=prefix_cache))
    engine = InferenceEngine(structs.replace(setup, config=config, vocab_size=1024))
    try:
        await engine.start()
        with pytest.raises(TokenIdError):
            await engine.submit([request(prompt=[1024])])
        for _ in range(2):
            await generate(engine, request(2, prompt=range(40)))
    finally:
        await engine.stop()
    events = recorded(engine)
    assert [event.skip_cache_read for event in events if isinstance(event, Arrived)] == [not prefix_cache] * 2
    cached = [event.cached_tokens for event in events if isinstance(event, Finished)]
    assert cached == ([0, 32] if prefix_cache else [0, 0])
