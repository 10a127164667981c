"""A GGUF file of each architecture is the same model, of the same weights, as the checkpoint that it was made of."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from eventlm.errors import CheckpointError
from eventlm.models.config import model_of, read_model
from eventlm.models.fetch.gguf_folder import gguf_folder
from eventlm.models.gguf.config_json import ARCHITECTURES, config_json
from eventlm.models.gguf.header import read_parts
from eventlm.models.loader import load_decoder
from tests.models.families.proof import SMALL, make_checkpoint
from tests.models.families.test_gemma4 import DENSE as GEMMA4_DENSE
from tests.models.families.test_gemma4 import EXPERTS as GEMMA4_EXPERTS
from tests.models.families.test_gemma4 import SHARED as GEMMA4_SHARED
from tests.models.gguf.files import add_keys, finish, to_gguf

SIZES: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
}
PAIRS = SMALL["hidden_size"] // SMALL["num_attention_heads"] // 2
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * pair for pair in range(PAIRS // 2)],
    "long_factor": [2.0 + 0.7 * pair for pair in range(PAIRS // 2)],
    "attention_factor": 1.19,
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
GPT_OSS = YARN | {"truncate": False}
MINISTRAL = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
GEMMA3 = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
EVERY_SECOND = ["sliding_attention", "full_attention"]
WINDOWED = {"sliding_window": 9, "layer_types": EVERY_SECOND}

MIXTURE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
QWEN = MIXTURE | {"mlp_only_layers": [], "decoder_sparse_step": 1}
LOCAL = {"num_local_experts": 5, "num_experts_per_tok": 2}

STATES = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
LFM2 = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-4, "conv_L_cache": 4}

#: llama.cpp's name of the architecture, transformers', and fields of its config.
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("arcee", "ArceeForCausalLM", {}),
    ("cohere2", "Cohere2ForCausalLM", {"sliding_window": 9, "num_hidden_layers": 4, "logit_scale": 0.3}),
    ("command-r", "CohereForCausalLM", {"logit_scale": 0.3, "layer_norm_eps": 1e-4}),
    ("ernie4_5", "Ernie4_5ForCausalLM", {"head_dim": 32}),
    (
        "ernie4_5-moe",
        "Ernie4_5_MoeForCausalLM",
        {
            "num_hidden_layers": 4,
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_intermediate_size": 48,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 2,
            "rms_norm_eps": 1e-5,
        },
    ),
    ("exaone4", "Exaone4ForCausalLM", WINDOWED),
    (
        "exaone4",
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "rope_parameters": LLAMA3, "head_dim": 16},
    ),
    ("gemma", "GemmaForCausalLM", {"head_dim": 32}),
    ("gemma2", "Gemma2ForCausalLM", {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16}),
    (
        "gemma3",
        "Gemma3ForCausalLM",
        {
            "head_dim": 32,
            "sliding_window": 9,
            "query_pre_attn_scalar": 32,
            "num_hidden_layers": 6,
            "rope_parameters": GEMMA3,
        },
    ),
    ("gemma4", "Gemma4ForCausalLM", GEMMA4_DENSE | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    ("gemma4", "Gemma4ForCausalLM", GEMMA4_SHARED | {"final_logit_softcapping": 30.0}),
    ("gemma4", "Gemma4ForCausalLM", GEMMA4_DENSE | GEMMA4_EXPERTS),
    ("glm4", "Glm4ForCausalLM", {"head_dim": 16, "attention_bias": True}),
    (
        "glm4moe",
        "Glm4MoeForCausalLM",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "n_shared_experts": 1,
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 32,
            "num_nextn_predict_layers": 1,
        },
    ),
    ("gpt-oss", "GptOssForCausalLM", LOCAL | {"head_dim": 16, "sliding_window": 9, "rope_parameters": GPT_OSS}),
    ("granitemoe", "GraniteMoeForCausalLM", LOCAL | {"attention_multiplier": 0.2, "logits_scaling": 5.0}),
    ("granitemoe", "GraniteMoeSharedForCausalLM", LOCAL | {"shared_intermediate_size": 80, "logits_scaling": 5.0}),
    (
        "granite",
        "GraniteForCausalLM",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 5.0,
        },
    ),
    ("lfm2", "Lfm2ForCausalLM", LFM2 | {"block_auto_adjust_ff_dim": False, "conv_bias": True}),
    ("lfm2moe", "Lfm2MoeForCausalLM", LFM2 | MIXTURE | {"num_dense_layers": 1}),
    ("llama", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    ("llama", "LlamaForCausalLM", {"head_dim": 32, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    ("llama", "LlamaForCausalLM", {"rope_parameters": YARN | {"attention_factor": 1.25}}),
    ("llama", "MixtralForCausalLM", LOCAL | {"head_dim": 32}),
    ("mistral3", "MistralForCausalLM", {"sliding_window": None}),
    ("mistral3", "Ministral3ForCausalLM", {"head_dim": 16, "rope_parameters": MINISTRAL}),
    ("nemotron", "NemotronForCausalLM", {}),
    ("olmo", "OlmoForCausalLM", {}),
    ("olmo2", "Olmo2ForCausalLM", {}),
    ("olmo2", "Olmo3ForCausalLM", {**WINDOWED, "rope_parameters": YARN | {"attention_factor": 1.25}}),
    ("olmoe", "OlmoeForCausalLM", {"num_experts": 5, "num_experts_per_tok": 2}),
    ("phi2", "PhiForCausalLM", {"num_key_value_heads": 4}),
    ("phi3", "Phi3ForCausalLM", {"sliding_window": 9}),
    ("phi3", "Phi3ForCausalLM", {"rope_parameters": LONGROPE, "sliding_window": None}),
    ("qwen2", "Qwen2ForCausalLM", {"rope_parameters": YARN}),
    ("qwen2moe", "Qwen2MoeForCausalLM", QWEN | {"shared_expert_intermediate_size": 80}),
    ("qwen3", "Qwen3ForCausalLM", {"head_dim": 32}),
    ("qwen35", "Qwen3_5ForCausalLM", STATES),
    ("qwen35moe", "Qwen3_5MoeForCausalLM", STATES | MIXTURE | {"shared_expert_intermediate_size": 80}),
    ("qwen3moe", "Qwen3MoeForCausalLM", QWEN | {"head_dim": 32, "norm_topk_prob": True}),
    ("qwen3next", "Qwen3NextForCausalLM", STATES | MIXTURE | {"shared_expert_intermediate_size": 80}),
    ("seed_oss", "SeedOssForCausalLM", {"head_dim": 32, "attention_bias": True}),
    ("smollm3", "SmolLM3ForCausalLM", {"num_hidden_layers": 4}),
    ("stablelm", "StableLmForCausalLM", {"use_qkv_bias": True, "use_parallel_residual": False}),
    ("starcoder2", "Starcoder2ForCausalLM", {}),
]


def test_every_architecture_has_a_case() -> None:
    assert {architecture for architecture, _, _ in CASES} == ARCHITECTURES.keys()


@pytest.mark.parametrize(("architecture", "name", "fields"), CASES)
def test_it_is_the_same_model(
    architecture: str, name: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))
    make_checkpoint(tmp_path / "checkpoint", name, **SMALL | fields)
    to_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", architecture)
    folder = gguf_folder(tmp_path / "model.gguf")
    assert read_model(folder) == read_model(tmp_path / "checkpoint")
    found, wanted = (load_decoder(each, dtype="float32") for each in (folder, tmp_path / "checkpoint"))
    assert found.weights.keys() == wanted.weights.keys()
    for key, weight in wanted.weights.items():
        # Where one was added to a weight it has lost some of its last bits.
        assert torch.allclose(found.weights[key], weight, rtol=0, atol=1e-7 if wanted.model.norm.offset else 0), key


def test_the_dtype_is_that_of_most_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))
    make_checkpoint(tmp_path / "checkpoint", "LlamaForCausalLM", **SMALL)
    for kind, dtype in (("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q4_0", "bfloat16")):
        to_gguf(tmp_path / "checkpoint", tmp_path / f"{kind}.gguf", "llama", kind)
        assert read_model(gguf_folder(tmp_path / f"{kind}.gguf")).dtype == dtype


def test_factors_that_are_no_known_scaling_are_taken_as_they_are(tmp_path: Path) -> None:
    factors = [1.0, 2.0, 3.0, 4.5]
    values = config_of(tmp_path, {}, rope_factors=factors)
    scaling = values["rope_scaling"]
    assert (scaling["short_factor"], scaling["long_factor"]) == (factors, factors)
    assert (scaling["rope_type"], scaling["attention_factor"]) == ("longrope", 1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "mamba"}, "architecture mamba is not supported (supported: arcee"),
        ({"general.architecture": None}, "key general.architecture is missing"),
        ({"general.architecture": 3}, "key general.architecture is an integer, it must be a string"),
        ({"llama.block_count": None}, "key llama.block_count is missing"),
        ({"llama.block_count": 0}, "key llama.block_count is 0, it must be a positive integer"),
        (
            {"llama.block_count": 1 << 63},
            "key llama.block_count is 9,223,372,036,854,775,808, and the file has 2 tensors",
        ),
        ({"llama.block_count": 2.0}, "key llama.block_count is 2.0, it must be a positive integer"),
        ({"llama.embedding_length": 48}, "tensor token_embd.weight has shape [16, 32], by key llama.embedding_length"),
        ({"llama.attention.head_count": [4, 2]}, "key llama.attention.head_count differs by layer"),
        ({"llama.attention.head_count": 33}, "key llama.attention.head_count is 33, and the embedding has 32 columns"),
        ({"llama.attention.value_length": 4}, "key llama.attention.value_length is not 8"),
        ({"llama.attention.causal": False}, "key llama.attention.causal is False, and such models"),
        ({"llama.attention.scale": 0.25}, "key llama.attention.scale is 0.25, and llama models that have it"),
        ({"llama.attention.layer_norm_rms_epsilon": math.nan}, "key llama.attention.layer_norm_rms_epsilon is nan"),
        ({"llama.rope.freq_base": 0.0}, "key llama.rope.freq_base is 0.0, it must be more than 1"),
        ({"llama.rope.scaling.type": "sideways"}, "key llama.rope.scaling.type is sideways, without what that needs"),
        ({"llama.rope.dimension_count": 9}, "partial_rotary_factor 1.125 is not supported"),
    ],
)
def test_what_cannot_be_run_is_told(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        model_of(config_of(tmp_path, changes), tmp_path / "model.gguf")
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'model.gguf'}: ")


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({}, None),
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scaling.factor": 2.0, "scale_linear": 4.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"scaling.type": "linear", "scaling.factor": 0.0}, None),
        ({"scaling.type": "none", "scaling.factor": 4.0}, None),
        ({"scaling.type": "yarn", "scaling.factor": 0.0, "scaling.original_context_length": 0},
         {"rope_type": "yarn", "factor": 1.0}),
    ],
)  # fmt: skip
def test_scaling_is_what_llama_cpp_takes_it_for(
    keys: dict[str, Any], scaling: dict[str, Any] | None, tmp_path: Path
) -> None:
    values = config_of(tmp_path, {f"llama.rope.{key}": value for key, value in keys.items()})
    assert values.get("rope_scaling") == scaling


@pytest.mark.parametrize("scale", [0.0, None])
def test_a_scale_of_nothing_is_none(scale: float | None, tmp_path: Path) -> None:
    changes = {f"granite.{key.removeprefix('llama.')}": value for key, value in SIZES.items() if "llama." in key}
    changes |= {"granite.attention.scale": scale, "granite.residual_scale": scale, "granite.logit_scale": 8.0}
    changes |= {"general.architecture": "granite", "granite.attention.layer_norm_rms_epsilon": 1e-5}
    attention = model_of(config_of(tmp_path, changes), tmp_path).attention
    assert attention.scale == 8**-0.5


def test_numbers_are_those_that_were_meant(tmp_path: Path) -> None:
    values = config_of(tmp_path, {"llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 500000.0})
    assert (values["rms_norm_eps"], values["rope_theta"]) == (1e-5, 500000.0)
    assert values["head_dim"] == 8
    assert values["max_position_embeddings"] == 64


def config_of(folder: Path, changes: dict[str, Any], *, rope_factors: list[float] | None = None) -> dict[str, Any]:
    """Of a file with an embedding and a norm alone."""
    metadata = SIZES | changes
    writer = GGUFWriter(folder / "model.gguf", "llama")
    writer.kv_data[0].clear()
    add_keys(writer, {key: value for key, value in metadata.items() if value is not None})
    writer.add_tensor("token_embd.weight", np.zeros((16, 32), np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(32, np.float32))
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    finish(writer)
    return config_json(read_parts([folder / "model.gguf"]))
