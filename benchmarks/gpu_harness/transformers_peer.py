"""transformers' continuous batching, the engine that most people have already, on the same device."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_harness.engines import Workload
from benchmarks.gpu_harness.row import Context, SectionError

#: A token that no model draws, so that all outputs have their full length.
NO_TOKEN = -1
POLL_SECONDS = 1.0
WARM_UP_TOKENS = 4


class PeerRun(NamedTuple):
    """What came of a workload."""

    num_tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return self.num_tokens / self.seconds


def generate(context: Context, folder: Path, workload: Workload) -> PeerRun:
    """What `model.generate_batch` does, with an output length for each prompt. Raises SectionError if some are not
    generated.
    """
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to(context.device).eval()
    # Without, it takes most of the memory.
    sizes: dict[str, Any] = {"num_blocks": 16, "max_batch_tokens": 256} if context.smoke else {}
    config = GenerationConfig(do_sample=True, temperature=0.6, top_k=0, eos_token_id=NO_TOKEN, pad_token_id=0)
    config.max_new_tokens = max(workload.output_lens)
    batching = {
        "generation_config": config,
        "continuous_batching_config": ContinuousBatchingConfig(**sizes),
        "workload_hints": WorkloadHints(
            max_prompt_length=max(map(len, workload.prompts)),
            max_generated_length=config.max_new_tokens,
            num_requests=len(workload.prompts),
        ),
    }
    with torch.no_grad(), model.continuous_batching_context_manager(**batching, timeout=5) as manager:
        _run(manager, Workload(workload.prompts, [WARM_UP_TOKENS] * len(workload.prompts)))
        began = time.perf_counter()
        num_tokens = _run(manager, workload)
        return PeerRun(num_tokens, time.perf_counter() - began)


def _run(manager: Any, workload: Workload) -> int:
    """Give it all at once and wait; the number of tokens generated."""
    for prompt, length in zip(workload.prompts, workload.output_lens, strict=True):
        manager.add_request(prompt, max_new_tokens=length)
    num_tokens = num_finished = 0
    while num_finished < len(workload.prompts):
        output = manager.get_result(timeout=POLL_SECONDS)
        if output is None:
            if not manager.is_running():
                raise SectionError("transformers' generation thread ended; its error is in the output above")
        elif output.error is not None:
            raise SectionError(f"transformers: {output.error}")
        elif output.is_finished():
            num_finished += 1
            num_tokens += len(output.generated_tokens)
    if num_tokens != sum(workload.output_lens):
        raise SectionError(f"transformers generated {num_tokens} tokens of {sum(workload.output_lens)}")
    return num_tokens
