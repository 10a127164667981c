"""The core's limits for backends, from what they say of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from eventlm.config.backends import BackendSpec
from eventlm.config.core import MAX_BLOCKS, MAX_REPLICAS
from eventlm.config.load import load_config
from eventlm.engine.backend import Backend, BackendFacts
from eventlm.engine.backends.setup import FoundBackend, make_backends_setup
from eventlm.engine.setup import EngineSetup, num_own_workers, worker_setups

URLS = ["http://a:1", "http://b:2"]


def connect(spec: BackendSpec) -> Backend:
    raise AssertionError("nothing is asked here")


def setup_for(*facts: BackendFacts | None, max_concurrency: int = 0, **options: Any) -> EngineSetup:
    found = [
        FoundBackend(BackendSpec(url=url, key="s3", max_concurrency=max_concurrency), each)
        for url, each in zip(URLS, facts, strict=False)
    ]
    config = load_config(None, {"backend": URLS} | options, environment={})
    return make_backends_setup(config, found, model_name="m", connect=connect)


def test_without_a_word_from_backends() -> None:
    setup = setup_for(BackendFacts(kind="openai"), None)
    core = setup.core
    assert (core.models, core.num_replicas, core.max_num_seqs, core.block_size) == (["m"], 18, 256, 16)
    assert (core.num_blocks, core.max_model_len) == (262_144 // 16 + 1, 262_144)
    assert setup.backends == [BackendSpec(url=url, key="s3") for url in URLS]
    assert setup.forwards
    assert worker_setups(setup) == []
    assert num_own_workers(setup.config) == 0


def test_limits_are_those_that_all_backends_keep() -> None:
    facts = [
        BackendFacts(kind="vllm", version="0.9", models=["m"], max_model_len=8192, cache_tokens=100_000),
        BackendFacts(kind="llamacpp", max_model_len=4096, max_concurrency=300, cache_tokens=50_000),
    ]
    core = setup_for(*facts).core
    assert (core.max_model_len, core.num_blocks, core.max_num_seqs) == (4096, 50_000 // 16 + 1, 300)
    assert setup_for(*facts, max_model_len=1000).core.max_model_len == 1000
    assert setup_for(*facts, max_concurrency=512).core.max_num_seqs == 512
    # A context that a backend takes is never refused for want of blocks.
    assert setup_for(BackendFacts(kind="sglang", max_model_len=8192, cache_tokens=100)).core.max_model_len == 8192


@pytest.mark.parametrize(("max_backends", "expected"), [(0, 18), (2, 2), (40, 40), (MAX_REPLICAS, MAX_REPLICAS)])
def test_slots(max_backends: int, expected: int) -> None:
    core = setup_for(None, BackendFacts(kind="openai"), max_backends=max_backends).core
    assert core.num_replicas == expected
    assert core.num_replicas * core.num_blocks <= MAX_BLOCKS


def test_settings_of_attempts() -> None:
    options = {"forward_retries": 4, "retry_backoff_ms": 100, "retry_budget_percent": 5, "hedge_ms": 50}
    forwards = setup_for(None, **options).core.forwards
    assert forwards
    assert (forwards.max_attempts, forwards.backoff_ns) == (5, 100_000_000)
    assert (forwards.retry_share_ppm, forwards.hedge_ns) == (50_000, 50_000_000)


def test_the_header_says_what_the_backends_are_and_shows_no_key() -> None:
    host = setup_for(BackendFacts(kind="vllm", version="0.9", models=["m"]), None).backends_host
    assert host == {
        "device": "backends",
        "backends": [{"url": URLS[0], "kind": "vllm", "version": "0.9", "model": "m"}, {"url": URLS[1]}],
    }
