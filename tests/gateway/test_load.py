"""What is read of the metrics of each kind of server, in the forms that they have."""

from __future__ import annotations

import pytest

from eventlm.engine.backend import BackendLoad
from eventlm.gateway.counts import MOST
from eventlm.gateway.load import parse_cache_tokens, parse_load

VLLM = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a }b"} 3.0
vllm:num_requests_running{engine="1",model_name="a }b"} 1.0
vllm:num_requests_waiting{engine="0",model_name="a }b"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="a }b"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a }b"} 1.5e-01
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="100",num_gpu_blocks_override="None"} 1.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="50"} 1.0
"""
SGLANG = b"""\
sglang:num_running_reqs{model_name="m",tp_rank="0"} 5.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 7.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.5
"""
SGLANG_RANKS = b"""\
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 5.0
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",pp_rank="1",tp_rank="0"} 5.0
sglang:num_running_reqs{dp_rank="1",engine_type="unified",model_name="m",pp_rank="0",tp_rank="1"} 2.0
sglang:num_queue_reqs{model_name="m",priority=""} 3.0
sglang:num_queue_reqs{model_name="m",priority="1"} 2.0
sglang:num_queue_reqs{model_name="m",priority="2"} 1.0
"""
LLAMACPP = b"llamacpp:requests_processing 4\nllamacpp:requests_deferred 2\nllamacpp:n_decode_total 3\n"


@pytest.mark.parametrize(
    ("text", "load"),
    [
        (VLLM, BackendLoad(4, 2, 200_000)),
        (VLLM.replace(b"\n", b"\r\n"), BackendLoad(4, 2, 200_000)),
        (VLLM.replace(b"kv_cache", b"gpu_cache"), BackendLoad(4, 2, 200_000)),
        (SGLANG, BackendLoad(5, 7, 500_000)),
        (SGLANG_RANKS, BackendLoad(7, 3, -1)),
        (LLAMACPP, BackendLoad(4, 2, -1)),
        (LLAMACPP + b"llamacpp:kv_cache_usage_ratio 0.125\n", BackendLoad(4, 2, 125_000)),
        (b"llamacpp:requests_processing 4 1700000000000\n", BackendLoad(4, -1, -1)),
        (b"process_cpu_seconds_total 3\n", None),
        (b"# vllm:num_requests_running 3\n", None),
        (b"vllm:num_requests_running Nan\n", None),
        (b"vllm:num_requests_running .\nvllm:num_requests_running +Inf\n", None),
        (b"vllm:num_requests_running -5\nvllm:num_requests_waiting 1e400\n", BackendLoad(0, MOST, -1)),
        (b"vllm:num_requests_waiting 1e30\nsglang:token_usage 1e300\n", BackendLoad(-1, MOST, MOST)),
        (b"<html>", None),
        (b"", None),
    ],
)
def test_load(text: bytes, load: BackendLoad | None) -> None:
    assert parse_load(text) == load


def test_cache_tokens() -> None:
    assert parse_cache_tokens(VLLM) == 16 * 150
    assert parse_cache_tokens(SGLANG) == 0
    assert parse_cache_tokens(b'vllm:cache_config_info{block_size="%s",num_gpu_blocks="5"} 1\n' % (b"9" * 5000)) == 0


def test_cache_tokens_as_vllm_0_32_says() -> None:
    """Several labels have the names of the two as a part."""
    line = (
        b'vllm:cache_config_info{_block_size_resolved="True",block_size="128",effective_attention_block_size="64",'
        b'kv_cache_size_tokens="46592",mamba_block_size="None",num_cpu_blocks="None",num_gpu_blocks="364",'
        b'num_gpu_blocks_override="None"} 1.0\n'
    )
    assert parse_cache_tokens(line) == 46592
