"""What users of vLLM, SGLang and llama.cpp call an option, and what is here in its place.

The command line, the TOML file and the keywords of `LLM` all answer an unknown name from this table.
"""

from __future__ import annotations

import re
from collections.abc import Callable

#: By the option that does the same here.
_SAME_AS = {
    "api_servers": "api_server_count",
    "batch_invariant": "enable_deterministic_inference",
    "block_size": "page_size",
    "cors_origin": "allowed_origins",
    "drain_seconds": "timeout_graceful_shutdown",
    "gpu_memory_utilization": "mem_fraction_static",
    "kv_cache_dtype": "cache_type_k cache_type_v ctk ctv",
    "log_level": "uvicorn_log_level verbosity lv",
    "max_model_len": "context_length ctx_size c max_seq_len",
    "max_num_batched_tokens": "chunked_prefill_size max_prefill_tokens batch_size b ubatch_size ub",
    "max_num_seqs": "max_running_requests parallel np",
    "max_queue_len": "max_queued_requests",
    "model": "m model_path hf hf_repo",
    "num_blocks": "num_gpu_blocks_override",
    "pipeline_parallel_size": "pp_size pp",
    "policy": "scheduling_policy schedule_policy",
    "quantization": "q",
    "replicas": "data_parallel_size dp_size dp",
    "served_model_name": "alias a",
    "tensor_parallel_size": "tp_size tp",
    "threads": "t",
    "tls_cert": "ssl_certfile ssl_cert_file",
    "tls_key": "ssl_keyfile ssl_key_file",
    "tokenizer_info": "enable_tokenizer_info_endpoint",
    "tool_parser": "tool_call_parser",
    "torch_compile": "enable_torch_compile",
}

#: Where there is more to say. A name in braces is an option of eventlm.
_REMARKS = {
    "cpu_offload_gb swap_space swap_size": "not there yet; a request that gives way is computed again",
    "chat_template": "the model's own is used, from its folder",
    "max_total_tokens": "{num_blocks} is the KV cache in blocks, {kv_memory} in bytes",
    "n_gpu_layers gpu_layers ngl": "a model is on GPUs with all of its layers or none; {device} says which",
    "load_format": "weights are read from safetensors and GGUF files",
    "download_dir": "the variable HF_HOME says where models of the hub are kept",
    "seed": "each request has its own: the field `seed`",
    "tokenizer_path": "the model's own is used, from its folder",
    "trust_remote_code": "it is never done: a model's code is not run",
    "enable_lora enable_loras lora lora_modules lora_paths max_loras max_lora_rank": "not there yet: adapters",
    "distributed_executor_backend": "{launcher} says what starts ranks: process (vLLM's mp) or ray",
    "enable_expert_parallel ep_size": "with {tensor_parallel_size} each rank has a part of every expert",
    "speculative_config speculative_model speculative_algorithm num_speculative_tokens model_draft": (
        "not there yet: speculative decoding"
    ),
    "enforce_eager disable_cuda_graph": "{cuda_graphs} turns CUDA graphs on and off",
    "enable_prefix_caching enable_radix_cache": "it is on by itself; see {prefix_cache}",
    "no_enable_prefix_caching disable_radix_cache": "{prefix_cache} turns it on and off",
    "enable_server_load_tracking": "it is always on: GET /load",
    "enable_chunked_prefill": "it is always on; {max_num_batched_tokens} bounds a step",
    "enable_auto_tool_choice enable_reasoning jinja": "it is always on, in the format that the model knows",
    "guided_decoding_backend structured_outputs_config grammar_backend": "it is always there, with llguidance",
    "disable_log_requests enable_log_requests no_enable_log_requests": (
        "what requests say is never logged; {log_level} says which lines are"
    ),
    "disable_log_stats": "{log_stats_interval_s} 0 turns the lines off; /metrics has the figures too",
    "decode_log_interval": "{log_stats_interval_s} is the interval in seconds",
    "embedding embeddings task runner": "embeddings are always there, at /v1/embeddings",
}

_TABLE = {
    **{name: f"its name here is {{{option}}}" for option, names in _SAME_AS.items() for name in names.split()},
    **{name: remark for names, remark in _REMARKS.items() for name in names.split()},
}


def name_elsewhere(name: str, written: Callable[[str], str]) -> str:
    """What is here in the place of another engine's option, as the end of a message: `; its name here is --tls-key`.

    `name` is a flag or a key, `written` makes an option's name what the user would type. Empty if no other engine is
    known to have it.
    """
    remark = _TABLE.get(name.lstrip("-").replace("-", "_"), "")
    return remark and "; " + re.sub(r"\{(\w+)\}", lambda match: written(match[1]), remark)
