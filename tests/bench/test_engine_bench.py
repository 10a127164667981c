"""The engine's own benchmarks over a fake worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from eventlm.bench.draws import parse_lengths
from eventlm.bench.engine_bench import RequestFactory, run_batch
from eventlm.bootstrap.composition import Composition, compose
from eventlm.config import Config, ModelConfig, RecordConfig
from eventlm.engine.request import ContextLengthError, Request
from eventlm.events import Arrived
from tests.serving import verified


@asynccontextmanager
async def started(record: Path | None = None, **fake: Any) -> AsyncIterator[Composition]:
    composed = compose(
        Config(
            model=ModelConfig(model="fake", fake=fake, max_model_len=512),
            record=RecordConfig(record=str(record) if record else ""),
        )
    )
    try:
        await composed.engine.start()
        yield composed
    finally:
        await composed.engine.stop()


def make(factory: RequestFactory, number: int, input_len: str = "20", output_len: str = "6") -> list[Request]:
    return factory.make(number, parse_lengths(input_len, "--input-len"), parse_lengths(output_len, "--output-len"))


async def test_a_batch_goes_through_the_engine(tmp_path: Path) -> None:
    finished = []
    async with started(tmp_path, end_ppm=300_000) as composed:
        group = make(RequestFactory(composed, seed=0), 12, "uniform:min=5,max=40", "uniform:min=1,max=20")
        result = await run_batch(composed.engine, group, asyncio.Event(), on_finish=lambda: finished.append(True))
        assert composed.engine.run_folder is not None
        trace = composed.engine.run_folder / "trace.jsonl"
    wanted = [request.sampling.max_tokens for request in group]
    assert (len(finished), result.num_finished, result.output_tokens) == (12, 12, sum(wanted))
    assert result.prompt_tokens == sum(len(request.prompt_token_ids) for request in group)
    assert result.duration_ns > 0
    assert not result.is_interrupted
    recorded = verified(trace)
    assert len({event.ts for event in recorded.of(Arrived)}) == 1


async def test_stop_counts_what_there_is() -> None:
    stop = asyncio.Event()
    async with started(base_ns=5_000_000) as composed:
        factory = RequestFactory(composed, seed=0)
        group = make(factory, 2, output_len="2") + make(factory, 2, output_len="480")
        result = await run_batch(composed.engine, group, stop, on_finish=stop.set)
    assert result.is_interrupted
    assert result.num_finished in (1, 2)
    assert 2 <= result.output_tokens < 4 + 960


async def test_a_request_that_does_not_fit() -> None:
    async with started() as composed:
        group = make(RequestFactory(composed, seed=0), 1, "600")
        with pytest.raises(ContextLengthError, match="600 prompt tokens"):
            await run_batch(composed.engine, group, asyncio.Event())


async def test_prompts_follow_from_the_seed_and_never_repeat() -> None:
    composed = compose(Config(model=ModelConfig(model="fake")))
    first, second = RequestFactory(composed, seed=1), RequestFactory(composed, seed=1)
    prompts = [request.prompt_token_ids for request in make(first, 3) + make(first, 3)]
    assert prompts == [request.prompt_token_ids for request in make(second, 6)]
    assert len({tuple(prompt) for prompt in prompts}) == 6
    assert prompts[0] != make(RequestFactory(composed, seed=2), 1)[0].prompt_token_ids


async def test_a_shared_prefix_comes_on_top() -> None:
    factory = RequestFactory(compose(Config(model=ModelConfig(model="fake"))), seed=1, prefix_tokens=30)
    one, two = (request.prompt_token_ids for request in make(factory, 2))
    assert len(one) == len(two) == 50
    assert one[:30] == two[:30]
    assert one[30:] != two[30:]
