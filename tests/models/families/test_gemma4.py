"""Gemma 4 computes what transformers computes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from eventlm import LLM, SamplingParams
from eventlm.errors import CheckpointError
from eventlm.models.config import model_of, read_model
from eventlm.models.weights.find_weights import find_weights
from tests.checkpoints import VOCAB_SIZE, make_tokenizer
from tests.models.families.proof import SMALL, STABLE_BUILD, make_checkpoint, prove
from tests.serving import verified

#: Of full attention the heads are larger, and in one case fewer.
DENSE: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
}
SHARED: dict[str, Any] = DENSE | {
    "num_hidden_layers": 5,
    "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 170,
    "use_double_wide_mlp": True,
}
EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}
#: Of towers that are left aside.
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "patch_size": 4,
    "position_embedding_size": 16,
}
AUDIO = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "subsampling_conv_channels": [4, 4],
    "output_proj_dims": 16,
}
CASES: dict[str, dict[str, Any]] = {
    "gemma4": {
        "architecture": "Gemma4ForCausalLM",
        **DENSE,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": False,
    },
    "gemma4 with shared keys and inputs of layers": {"architecture": "Gemma4ForCausalLM", **SHARED},
    "gemma4 with experts": {"architecture": "Gemma4ForCausalLM", **DENSE, **EXPERTS},
    "gemma4 in a multimodal model": {
        "architecture": "Gemma4ForConditionalGeneration",
        "text_config": SMALL | SHARED,
        "vision_config": VISION,
        "audio_config": AUDIO,
    },
    "gemma4 unified": {"architecture": "Gemma4UnifiedForCausalLM", **DENSE, "attention_k_eq_v": True},
}


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_transformers_computes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove(tmp_path, monkeypatch, **CASES[case])


def test_matrices_that_no_layer_multiplies_by_are_left_in_the_file(tmp_path: Path) -> None:
    """Published checkpoints have keys and values of layers that attend to others', too."""
    make_checkpoint(tmp_path, **SMALL | CASES["gemma4 in a multimodal model"])
    model, path = read_model(tmp_path), tmp_path / "model.safetensors"
    before = {weight.key for file in find_weights(tmp_path, model) for weight in file.weights}
    tensors = load_file(path)
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    unused = {
        f"model.language_model.layers.4.self_attn.{name}.weight": tensors["model.language_model.norm.weight"]
        for name in names
    }
    save_file(tensors | {name: value.clone() for name, value in unused.items()}, path, metadata={"format": "pt"})
    assert before == {weight.key for file in find_weights(tmp_path, model) for weight in file.weights}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention all is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ({"use_bidirectional_attention": "foo"}, "use_bidirectional_attention foo is not supported"),
        ({"per_layer_config": {"3": {}}}, "per_layer_config has '3', which is no number of a layer from 0 to 2"),
        ({"per_layer_config": {"01": {}}}, "per_layer_config has '01', which is no number of a layer from 0 to 2"),
        ({"per_layer_config": {"0": {"head_dim": True}}}, "per_layer_config.0.head_dim is True, and must be an"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_told(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = SMALL | DENSE | {"max_position_embeddings": 64} | fields
    with pytest.raises(CheckpointError) as caught:
        model_of({"architectures": ["Gemma4ForCausalLM"], "vocab_size": 170, **config}, tmp_path / "config.json")
    assert message in str(caught.value)


@pytest.mark.parametrize("quantization", [pytest.param("none", marks=pytest.mark.soak), "int4"])
def test_hits_and_preemptions_change_no_token(quantization: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    vocabularies = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE)
    make_checkpoint(folder, **SMALL | CASES["gemma4 with shared keys and inputs of layers"] | vocabularies)
    make_tokenizer(folder)
    rng = random.Random(0)
    start = [rng.randrange(3, VOCAB_SIZE) for _ in range(50)]
    prompts: list[Any] = [
        {"prompt_token_ids": start[: 16 * (number % 4)] + [rng.randrange(3, VOCAB_SIZE) for _ in range(9)]}
        for number in range(8)
    ]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    def tokens(run: Path, **options: Any) -> list[list[int]]:
        sizes: dict[str, Any] = {
            "block_size": 16,
            "max_num_batched_tokens": 32,
            "max_num_seqs": 16,
            "max_model_len": 128,
            "threads": 1,
            "cpu_kernels": STABLE_BUILD,
        }
        with LLM(folder, record=run, dtype="bfloat16", quantization=quantization, **sizes | options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        assert verified(run / "latest" / "trace.jsonl").result.clean_end
        return [list(output.outputs[0].token_ids) for output in outputs]

    small = tokens(tmp_path / "small", num_blocks=14, predictor=[1000] * 5)
    assert '"t":"preempt"' in (tmp_path / "small" / "latest" / "trace.jsonl").read_text()
    assert small == tokens(tmp_path / "large", num_blocks=80, prefix_cache=False)
