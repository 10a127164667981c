"""Requests with grammars in an engine over real fake workers: waiting, losses, cancels, and the replay of all that."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from eventlm.engine.replicas import grammar_builds
from eventlm.engine.request import Request
from eventlm.events import GrammarReady, Launched, WorkerLost
from eventlm.text.grammar import choice_grammar, json_schema_grammar, lark_grammar
from tests.engine.engines import FAKE, Reader, generate, recorded, request, running, verified
from tests.processes import PATIENCE_SECONDS

EOS = 257
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "marks": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 6}, "maxItems": 5},
    },
    "required": ["name", "marks"],
    "additionalProperties": False,
}
GRAMMAR = json_schema_grammar(SCHEMA, "p")


def asking(grammar: str = GRAMMAR, *, seed: int = 5, **changes: Any) -> Request:
    asked = request(200, seed=seed, **changes)
    params = structs.replace(asked.sampling, grammar=grammar, eos_token_ids=(EOS,))
    return structs.replace(asked, sampling=params).with_scheduling(waits_for_grammar=True)


def text(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token != EOS).decode()


async def test_outputs_match_and_the_run_verifies(tmp_path: Path) -> None:
    async with running(record=tmp_path, replicas=2) as engine:
        group = [asking(seed=seed, n=2) for seed in range(6)]
        readers = await generate(engine, *group, asking(choice_grammar(["yes", "no"], "p")), request())
        for reader in readers[:6]:
            for tokens, reason in zip(reader.tokens, reader.reasons, strict=True):
                assert reason in ("grammar", "eos")
                assert set(json.loads(text(tokens))) == {"name", "marks"}
        assert text(readers[6].tokens[0]) in ("yes", "no")
        assert readers[7].reasons == ["length"]
        assert len(engine.grammars) == 0
    ready = [event for event in recorded(engine) if isinstance(event, GrammarReady)]
    assert len(ready) == 7
    assert "maxLength" not in (tmp_path / "latest" / "trace.jsonl").read_text()
    assert verified(engine).num_decisions > 0


async def test_a_loss_changes_no_output_and_the_run_verifies(tmp_path: Path) -> None:
    async with running() as engine:
        expected = [reader.tokens for reader in await generate(engine, *[asking(seed=seed) for seed in range(4)])]
    async with running(record=tmp_path, fake=FAKE | {"base_ns": 10_000_000}) as engine:
        handles = await engine.submit([asking(seed=seed) for seed in range(4)])
        readers = [Reader(handle) for handle in handles]
        for num_tokens in (3, 9):
            await readers[0].until_tokens(num_tokens)
            os.kill(engine.worker_pids[0], signal.SIGKILL)
            await asyncio.sleep(0)
        handles[3].cancel()
        done = [await reader.done() for reader in readers]
        assert [reader.tokens for reader in done[:3]] == expected[:3]
        assert done[3].reasons == ["cancelled"]
    events = recorded(engine)
    assert sum(isinstance(event, WorkerLost) for event in events) >= 1
    assert verified(engine).num_decisions > 0


async def test_a_grammar_that_the_model_cannot_follow_fails_only_its_own_request(tmp_path: Path) -> None:
    async with running(record=tmp_path) as engine:
        [handle] = await engine.submit([asking(lark_grammar('start: <|secret_token|> "a"', "p"), n=2)])
        refused = await Reader(handle, n=2).done()
        assert all(end is not None and "secret_token" in end.detail for end in refused.finished)
        [reader] = await generate(engine, asking())
        assert reader.reasons[0] in ("grammar", "eos")
    assert "secret" not in (tmp_path / "latest" / "trace.jsonl").read_text()
    assert [event.error for event in recorded(engine) if isinstance(event, GrammarReady)] == ["cannot be built", ""]
    verified(engine)


async def test_others_are_served_while_a_grammar_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker's answer is kept back; what is launched meanwhile is of the other request."""
    async with running(record=tmp_path) as engine:
        held: asyncio.Queue[Any] = asyncio.Queue()
        built = engine.grammars.built
        monkeypatch.setattr(engine.grammars, "built", lambda *answer: held.put_nowait(answer))
        [waiting] = [Reader(handle) for handle in await engine.submit([asking()])]
        [other] = await generate(engine, request(8))
        assert other.reasons == ["length"]
        answer = await asyncio.wait_for(held.get(), PATIENCE_SECONDS)
        assert waiting.tokens == [[]]
        built(*answer)
        assert (await waiting.done()).reasons[0] in ("grammar", "eos")
    launched = [event for event in recorded(engine) if isinstance(event, Launched)]
    assert launched
    verified(engine)


async def test_a_grammar_that_never_comes_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_builds, "GRAMMAR_SECONDS", 0.01)
    async with running() as engine:
        monkeypatch.setattr(engine.grammars, "built", lambda *answer: None)
        [handle] = await engine.submit([asking()])
        [end] = (await Reader(handle).done()).finished
        assert end is not None
        assert (end.reason, end.detail) == ("error", "it was not built in time")
