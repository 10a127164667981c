"""The metrics that published Grafana dashboards for vLLM read: its own, and those of its production stack."""

from __future__ import annotations

#: Families that the dashboards read, as scrapers name them.
GIVEN = {
    "vllm:cache_config_info",
    "vllm:e2e_request_latency_seconds",
    "vllm:engine_sleep_state",
    "vllm:generation_tokens",
    "vllm:inter_token_latency_seconds",
    "vllm:iteration_tokens_total",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:prefix_cache_hits",
    "vllm:prefix_cache_queries",
    "vllm:prompt_tokens",
    "vllm:prompt_tokens_by_source",
    "vllm:prompt_tokens_cached",
    "vllm:prompt_tokens_cached_by_source",
    "vllm:request_decode_time_seconds",
    "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_prefill_kv_computed_tokens",
    "vllm:request_prefill_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_queue_time_seconds",
    "vllm:request_success",
    "vllm:request_time_per_output_token_seconds",
    "vllm:time_to_first_token_seconds",
    "http_request_duration_seconds",
    "http_requests",
    "process_cpu_seconds",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
}

_NO_SPECULATION = "nothing is drafted here"
_NO_CONNECTOR = "KV is neither moved between servers nor offloaded"
_NO_SLEEP = "there is no sleep mode, and weights are not updated"
_OLD_NAME = "an older name, which vLLM has dropped"
_OF_THE_ROUTER = "a figure of the production stack's router"
_NOT_MEASURED = "the age of single blocks is not measured"
_NOT_ESTIMATED = "operations are not estimated; --profile-ops measures their time"

#: Families that they read and that are not given, with the reason.
NOT_GIVEN = {
    "vllm:cpu_cache_usage_perc": _OLD_NAME,
    "vllm:current_qps": _OF_THE_ROUTER,
    "vllm:estimated_flops_per_gpu": _NOT_ESTIMATED,
    "vllm:estimated_read_bytes_per_gpu": _NOT_ESTIMATED,
    "vllm:estimated_write_bytes_per_gpu": _NOT_ESTIMATED,
    "vllm:external_prefix_cache_hits": _NO_CONNECTOR,
    "vllm:external_prefix_cache_queries": _NO_CONNECTOR,
    "vllm:gpu_cache_usage_perc": _OLD_NAME,
    "vllm:gpu_prefix_cache_hits": _OLD_NAME,
    "vllm:gpu_prefix_cache_queries": _OLD_NAME,
    "vllm:healthy_pods_total": _OF_THE_ROUTER,
    "vllm:kv_block_idle_before_evict_seconds": _NOT_MEASURED,
    "vllm:kv_block_lifetime_seconds": _NOT_MEASURED,
    "vllm:kv_block_reuse_gap_seconds": _NOT_MEASURED,
    "vllm:kv_offload_allocation_failure": _NO_CONNECTOR,
    "vllm:kv_offload_cpu_cache_read_usage_perc": _NO_CONNECTOR,
    "vllm:kv_offload_cpu_cache_usage_perc": _NO_CONNECTOR,
    "vllm:kv_offload_cpu_cache_write_usage_perc": _NO_CONNECTOR,
    "vllm:kv_offload_load_bytes": _NO_CONNECTOR,
    "vllm:kv_offload_load_size": _NO_CONNECTOR,
    "vllm:kv_offload_load_time": _NO_CONNECTOR,
    "vllm:kv_offload_lookup_async_delay_seconds": _NO_CONNECTOR,
    "vllm:kv_offload_lookup_sync_delay_seconds": _NO_CONNECTOR,
    "vllm:kv_offload_store_bytes": _NO_CONNECTOR,
    "vllm:kv_offload_store_size": _NO_CONNECTOR,
    "vllm:kv_offload_store_time": _NO_CONNECTOR,
    "vllm:kv_offload_stores_skipped": _NO_CONNECTOR,
    "vllm:lora_requests_info": "there are no adapters",
    "vllm:mm_cache_hits": "prompts are text",
    "vllm:mm_cache_queries": "prompts are text",
    "vllm:nixl_bytes_transferred": _NO_CONNECTOR,
    "vllm:nixl_num_descriptors": _NO_CONNECTOR,
    "vllm:nixl_num_failed_notifications": _NO_CONNECTOR,
    "vllm:nixl_num_failed_transfers": _NO_CONNECTOR,
    "vllm:nixl_num_kv_expired_reqs": _NO_CONNECTOR,
    "vllm:nixl_num_notifications_after_expiry": _NO_CONNECTOR,
    "vllm:nixl_post_time_seconds": _NO_CONNECTOR,
    "vllm:nixl_xfer_time_seconds": _NO_CONNECTOR,
    "vllm:num_requests_kv_fetch_by_stage": _NO_CONNECTOR,
    "vllm:num_requests_swapped": _OLD_NAME,
    "vllm:rl_weight_update_operation_duration_seconds": _NO_SLEEP,
    "vllm:simple_kv_offload_load_blocks": _NO_CONNECTOR,
    "vllm:simple_kv_offload_pending_store_blocks": _NO_CONNECTOR,
    "vllm:simple_kv_offload_save_outcomes": _NO_CONNECTOR,
    "vllm:simple_kv_offload_used_blocks": _NO_CONNECTOR,
    "vllm:sleep_mode_operation_duration_seconds": _NO_SLEEP,
    "vllm:spec_decode_num_accepted_tokens": _NO_SPECULATION,
    "vllm:spec_decode_num_accepted_tokens_per_pos": _NO_SPECULATION,
    "vllm:spec_decode_num_draft_tokens": _NO_SPECULATION,
    "vllm:spec_decode_num_drafts": _NO_SPECULATION,
    "vllm:time_per_output_token_seconds": _OLD_NAME,
}

#: Labels by which their queries select, with the values that they name.
SELECTED = {
    "vllm:engine_sleep_state": {"sleep_state": {"awake", "discard_all"}},
    "vllm:num_requests_waiting_by_reason": {"reason": {"capacity", "deferred"}},
    "vllm:prompt_tokens_by_source": {"source": {"local_compute", "local_cache_hit", "external_kv_transfer"}},
    "vllm:request_success": {"finished_reason": {"error"}},
}
