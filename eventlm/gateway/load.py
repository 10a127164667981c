"""Reads a backend's Prometheus metrics: what it runs, what waits there, and its KV cache."""

from __future__ import annotations

import re
from collections.abc import Sequence

from eventlm.engine.backend import BackendLoad
from eventlm.gateway.counts import count_of

#: Names of the same in vLLM (eventlm has its names), SGLang and llama.cpp. The older ones come last.
_RUNNING = (b"vllm:num_requests_running", b"sglang:num_running_reqs", b"llamacpp:requests_processing")
_WAITING = (b"vllm:num_requests_waiting", b"sglang:num_queue_reqs", b"llamacpp:requests_deferred")
_KV_USED = (
    b"vllm:kv_cache_usage_perc",
    b"vllm:gpu_cache_usage_perc",
    b"sglang:token_usage",
    b"llamacpp:kv_cache_usage_ratio",
)
_NUMBER = rb"[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?"
_SAMPLE = re.compile(
    rb"^(" + b"|".join(_RUNNING + _WAITING + _KV_USED) + rb")(?:\{(.*)\})?[ \t]+(" + _NUMBER + b")", re.MULTILINE
)
#: Engines apart from each other. Samples that differ in other labels only, such as the rank, are of the same requests.
_ENGINE = re.compile(rb'\b(?:model_name|engine|dp_rank)="[^"]*"')
_CACHE_CONFIG = re.compile(rb"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(rb'\b(block_size|num_gpu_blocks)="([0-9]{1,18})"')


def parse_load(text: bytes) -> BackendLoad | None:
    """The load in a reply of `/metrics`, over all its engines; None if none of its metrics is known."""
    samples: dict[bytes, dict[tuple[bytes, ...], float]] = {}
    for name, labels, value in _SAMPLE.findall(text):
        of_engines = samples.setdefault(name, {})
        engine = tuple(_ENGINE.findall(labels))
        of_engines[engine] = max(float(value), of_engines.get(engine, 0.0))
    if not samples:
        return None
    running, waiting, used = (_first(samples, names) for names in (_RUNNING, _WAITING, _KV_USED))
    return BackendLoad(
        running=count_of(sum(running)) if running else -1,
        waiting=count_of(sum(waiting)) if waiting else -1,
        kv_used_ppm=count_of(1_000_000 * sum(used) / len(used)) if used else -1,
    )


def parse_cache_tokens(text: bytes) -> int:
    """Tokens that the KV caches of all engines hold, by vLLM's metrics; 0 if there is no word of it."""
    total = 0
    for labels in _CACHE_CONFIG.findall(text):
        found = dict(_LABEL.findall(labels))
        total += int(found.get(b"block_size", 0)) * int(found.get(b"num_gpu_blocks", 0))
    return total


def _first(samples: dict[bytes, dict[tuple[bytes, ...], float]], names: Sequence[bytes]) -> list[float]:
    return next((list(samples[name].values()) for name in names if name in samples), [])
