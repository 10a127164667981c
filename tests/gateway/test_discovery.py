"""What is found out about each kind of server by asking it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from eventlm.config.backends import BackendSpec
from eventlm.engine.backend import BackendError, BackendFacts
from eventlm.gateway.counts import MOST
from eventlm.gateway.discovery import Discovered, ask

MODEL = {"data": [{"id": "m"}]}
SGLANG = {
    "version": "0.5.10",
    "max_total_num_tokens": 20480,
    "internal_states": [{"effective_max_running_requests_per_dp": 128}] * 2,
    "api_key": None,
}
PROPS = {"default_generation_settings": {"n_ctx": 2048, "params": {}}, "total_slots": 4, "build_info": "b7000-abc"}


async def found(pages: dict[str, Any], **spec: Any) -> tuple[Discovered, list[str]]:
    """What is found of a server with these pages, and the pages that were asked for."""
    asked = []

    async def get(path: str) -> bytes:
        asked.append(path)
        if path not in pages:
            raise BackendError("not found", "refused", status=404)
        return pages[path] if isinstance(pages[path], bytes) else msgspec.json.encode(pages[path])

    return await ask(BackendSpec(url="http://h", **spec), get), asked


@pytest.mark.parametrize(
    ("pages", "facts"),
    [
        (
            {
                "/v1/models": {"data": [{"id": "m", "root": "org/m", "parent": None, "max_model_len": 512}]},
                "/version": {"version": "0.11.0"},
                "/metrics": b'vllm:cache_config_info{block_size="16",num_gpu_blocks="10"} 1.0\n',
            },
            BackendFacts(kind="vllm", version="0.11.0", models=["m"], max_model_len=512, cache_tokens=160),
        ),
        (
            {"/v1/models": MODEL, "/props": PROPS, "/metrics": b"llamacpp:requests_processing 0\n"},
            BackendFacts(
                kind="llamacpp", version="b7000-abc", models=["m"], max_model_len=2048, max_concurrency=4,
                cache_tokens=8192,
            ),
        ),
        *(
            (
                {
                    "/v1/models": {"data": [{"id": "m", "max_model_len": 99}]}, path: SGLANG,
                    "/api/version": {"version": "1"},
                },
                BackendFacts(
                    kind="sglang", version="0.5.10", models=["m"], max_model_len=99, max_concurrency=256,
                    cache_tokens=20480,
                ),
            )
            for path in ("/server_info", "/get_server_info")
        ),
        (
            {"/v1/models": MODEL, "/api/version": {"version": "0.12.6"}},
            BackendFacts(kind="ollama", version="0.12.6", models=["m"]),
        ),
        (
            {
                "/v1/models": {"data": [{"id": "m", "max_model_len": 64}]},
                "/version": {"version": "1.0", "server_id": "run-1"},
                "/props": PROPS,
                "/api/version": {"version": "0.12"},
            },
            BackendFacts(
                kind="eventlm", version="1.0", models=["m"], max_model_len=64, max_concurrency=4, server_id="run-1"
            ),
        ),
        ({"/v1/models": MODEL, "/version": b"<html>"}, BackendFacts(kind="openai", models=["m"])),
    ],
)  # fmt: skip
async def test_kinds_and_facts(pages: dict[str, Any], facts: BackendFacts) -> None:
    result, _ = await found(pages)
    assert result == Discovered(facts, "m")


async def test_a_kind_that_is_given_is_not_doubted() -> None:
    pages = {"/v1/models": MODEL, "/version": {"version": "1"}, "/props": PROPS}
    result, asked = await found(pages, kind="openai")
    assert (result.facts.kind, asked) == ("openai", ["/v1/models"])
    result, asked = await found(pages, kind="llamacpp")
    assert (result.facts.max_concurrency, asked) == (4, ["/v1/models", "/props"])


ADAPTED = {"data": [
    {"id": "m", "root": "org/m"}, {"id": "alias", "root": "org/m"}, {"id": "lora", "root": "files", "parent": "m"},
]}  # fmt: skip


@pytest.mark.parametrize(
    ("models", "spec", "model"),
    [
        (ADAPTED, {}, "m"),
        (ADAPTED, {"model": "lora"}, "lora"),
        ({"data": [{"id": "llama3:latest"}, {"id": "qwen:4b"}]}, {"model": "llama3"}, "llama3"),
        (MODEL, {"model": "whatever", "kind": "llamacpp"}, "whatever"),
    ],
)
async def test_the_name_of_the_model(models: Any, spec: dict[str, Any], model: str) -> None:
    result, _ = await found({"/v1/models": models}, **spec)
    assert result.model == model


@pytest.mark.parametrize(
    ("models", "spec", "message"),
    [
        ({"data": [{"id": "a"}, {"id": "b"}]}, {}, "several models; name one with model=NAME: a, b"),
        (MODEL, {"model": "x"}, "does not serve 'x'; it serves m"),
        ({"data": [{"id": str(n)} for n in range(20)]}, {}, "0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
        ({"data": []}, {}, "names no model"),
        ({"models": []}, {}, "is it an OpenAI-compatible server"),
        (b"<html>", {}, "is it an OpenAI-compatible server"),
    ],
)
async def test_models_that_cannot_be_meant(models: Any, spec: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        await found({"/v1/models": models}, **spec)


async def test_no_answer_is_not_no_page() -> None:
    async def get(path: str) -> bytes:
        if path == "/v1/models":
            return msgspec.json.encode(MODEL)
        raise BackendError("gone", "connect")

    with pytest.raises(BackendError, match="gone"):
        await ask(BackendSpec(url="http://h"), get)


async def test_numbers_that_are_no_counts() -> None:
    props = {"default_generation_settings": {"n_ctx": 10**30}, "total_slots": -1}
    discovered, _ = await found({"/v1/models": MODEL, "/props": props})
    facts = discovered.facts
    assert (facts.max_concurrency, facts.max_model_len, facts.cache_tokens) == (0, MOST, 0)
