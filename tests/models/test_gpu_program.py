"""Families that only the program runs on GPUs: a worker's tokens are those of transformers, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eventlm.models.config import read_model
from eventlm.models.spec import why_not_plain
from eventlm.sampling_params import SamplingParams
from eventlm.worker.gpu.runner import GpuRunner
from tests.models.families.proof import SMALL, make_checkpoint
from tests.worker.gpu.driven import Asked, Driven, Sample, gpu_runner
from tests.worker.gpu.test_runner import GREEDY

#: What the config's class has.
OWN = object()
#: Few layers and heads, for each program of a kernel takes the interpreter half a millisecond.
TINY: dict[str, Any] = SMALL | {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
CASES: dict[str, dict[str, Any]] = {
    # Windows in some layers, soft caps, norms before and after parts.
    "gemma2": {
        "architecture": "Gemma2ForCausalLM",
        "sliding_window": 9,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8,
    },
    # Two tables of rotary embeddings, norms of queries and keys with an offset.
    "gemma3": {
        "architecture": "Gemma3ForCausalLM",
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # Sinks, biases of experts, a clamped activation.
    "gpt-oss": {
        "architecture": "GptOssForCausalLM",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 9,
    },
    "qwen3-moe": {
        "architecture": "Qwen3MoeForCausalLM",
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    # One matrix for queries, keys and values, rotation of a part of a head.
    "phi3": {"architecture": "Phi3ForCausalLM", "partial_rotary_factor": 0.5, "head_dim": OWN},
    # Interleaved rotation, norms after parts, biases.
    "glm4": {"architecture": "Glm4ForCausalLM", "partial_rotary_factor": 0.5, "attention_bias": True},
    # One norm for both parts, which is no RMS norm.
    "cohere": {"architecture": "CohereForCausalLM", "logit_scale": 0.5, "use_qk_norm": False},
}
PROMPTS = [[5, 9, 7], [(7 * number) % 150 + 3 for number in range(27)]]


def without_nones(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None or name == "eos_token_id"}


LOGPROBS = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logprobs_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    exact = make_case(tmp_path, case)
    assert why_not_plain(read_model(tmp_path))
    check(tmp_path, exact, attention_backend="triton")


def test_torch_s_attention_knows_sinks_and_windows(tmp_path: Path) -> None:
    check(tmp_path, make_case(tmp_path, "gpt-oss"), attention_backend="torch_sdpa")


def test_a_batch_that_must_not_matter_does_not(tmp_path: Path) -> None:
    make_case(tmp_path, "gpt-oss", num_hidden_layers=1)
    asked = [Asked(prompt[:12], 2, GREEDY) for prompt in PROMPTS]
    options = {"batch_invariant": True, "dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    together = Driven(small_runner(tmp_path, **options), asked)
    for number, each in enumerate(asked):
        assert Driven(small_runner(tmp_path, **options), [each]).outputs[0] == together.outputs[number]


def make_case(folder: Path, case: str, **fields: Any) -> Any:
    """Transformers' model of the checkpoint that it saves."""
    fields = TINY | CASES[case] | fields
    model = make_checkpoint(folder, **{name: value for name, value in fields.items() if value is not OWN})
    # The others leave out soft caps in some versions.
    model.set_attn_implementation("eager")
    return model


def small_runner(folder: Path, **options: Any) -> GpuRunner:
    """The longer prompt takes two steps, and the shorter one decodes beside it."""
    return gpu_runner(folder, max_num_batched_tokens=20, max_num_seqs=2, graph_buckets=[1, 2], **options)


def check(folder: Path, exact: Any, **options: Any) -> None:
    """Greedy tokens and their log-probabilities in float32."""
    driven = Driven(small_runner(folder, **options), [Asked(prompt, 4, LOGPROBS) for prompt in PROMPTS])
    for number, prompt in enumerate(PROMPTS):
        output = driven.outputs[number]
        with torch.inference_mode():
            logits = exact(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :].float()
        assert output == logits.argmax(-1).tolist()
        extras = [each.logprobs for each in driven.extras[Sample(number, 0)] if each.logprobs is not None]
        found = [each.logprobs[0] for each in extras]
        assert found == pytest.approx(logits.log_softmax(-1).amax(-1).tolist(), abs=1e-4)
