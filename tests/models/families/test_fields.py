"""What config.json says in more than one way, what it leaves out, and what it says that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eventlm.errors import CheckpointError
from eventlm.models.config import read_model
from eventlm.models.families import FAMILIES, MULTIMODAL
from eventlm.models.spec import ModelSpec, RopeSpec

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "dtype": "bfloat16",
}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
NESTED = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}


def read(folder: Path, family: str, **values: Any) -> ModelSpec:
    """The model of a config.json of the family (the part of the name before `ForCausalLM`); None removes a key."""
    config = {"architectures": [f"{family}ForCausalLM"], **SIZES, **values}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return read_model(folder)


def test_both_spellings_of_rope_are_one(tmp_path: Path) -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    }
    old = read(tmp_path, "Llama", rope_theta=500000.0, rope_scaling=llama3)
    new = read(tmp_path, "Llama", rope_parameters={**llama3, "rope_theta": 500000})
    assert old == new
    assert old.ropes == (
        RopeSpec(
            type="llama3",
            theta=500000.0,
            rotary_dim=8,
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8,
        ),
    )
    [oldest] = read(tmp_path, "Llama", rope_scaling={"type": "linear", "factor": 2}).ropes
    assert (oldest.type, oldest.factor, oldest.theta) == ("linear", 2.0, 10000.0)


def test_the_one_that_is_used_hides_the_other(tmp_path: Path) -> None:
    other = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}
    [rope] = read(tmp_path, "Llama", rope_parameters=other, rope_scaling={"rope_type": "default"}).ropes
    assert (rope.type, rope.theta) == ("default", 10000.0)


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_longrope_has_had_other_names(tmp_path: Path, name: str) -> None:
    [rope] = read(tmp_path, "Phi3", rope_scaling={**LONG, "type": name, "rope_type": None}).ropes
    assert (rope.type, rope.original_max_position_embeddings, rope.attention_factor) == ("longrope", 4096, 1.0)
    [rope] = read(tmp_path, "Phi3", rope_scaling=LONG, original_max_position_embeddings=32).ropes
    assert rope.attention_factor == pytest.approx(2**0.5)  # sqrt(1 + log(1024 / 32) / log(32))


def test_the_longest_context(tmp_path: Path) -> None:
    def longest(family: str, **rope: Any) -> int:
        return read(tmp_path, family, rope_scaling=rope).max_position_embeddings

    assert longest("Llama", rope_type="linear", factor=4.0) == 4096
    assert longest("Llama", rope_type="yarn", factor=4.0, original_max_position_embeddings=1024) == 4096
    assert longest("Qwen3", rope_type="yarn", factor=4.0, original_max_position_embeddings=256) == 1024
    assert longest("Llama", rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0) == 1024
    # Its config.json has stretched it.
    assert longest("Gemma3", rope_type="linear", factor=4.0) == 1024


def windows(model: ModelSpec) -> list[int]:
    return [layer.attention.window for layer in model.layers]


def test_windows_by_layer(tmp_path: Path) -> None:
    """Of old config.json files, without `layer_types`."""
    assert windows(read(tmp_path, "Mistral", sliding_window=9)) == [9, 9, 9, 9]
    assert windows(read(tmp_path, "Qwen2", sliding_window=9, use_sliding_window=True, max_window_layers=3)) == [
        *(0, 0, 0),
        9,
    ]
    assert windows(read(tmp_path, "Qwen3", sliding_window=9, use_sliding_window=False, max_window_layers=0)) == [0] * 4
    assert windows(read(tmp_path, "Gemma2", sliding_window=9)) == [9, 0, 9, 0]
    assert windows(read(tmp_path, "Gemma3", sliding_window=9, sliding_window_pattern=3)) == [9, 9, 0, 9]
    assert windows(read(tmp_path, "Olmo3", sliding_window=9)) == [9, 9, 9, 0]
    assert windows(read(tmp_path, "Cohere2", sliding_window=9, sliding_window_pattern=2)) == [9, 0, 9, 0]
    assert windows(read(tmp_path, "Exaone4", sliding_window=9)) == [9, 9, 9, 0]
    assert windows(read(tmp_path, "Phi3", sliding_window=9)) == [9, 9, 9, 9]
    assert windows(read(tmp_path, "Mixtral", sliding_window=9)) == [9, 9, 9, 9]
    assert windows(read(tmp_path, "Qwen2Moe", sliding_window=9, use_sliding_window=True, max_window_layers=2)) == [
        9,
        *(0, 0, 0),
    ]
    assert windows(read(tmp_path, "Qwen2Moe", sliding_window=0)) == [0, 0, 0, 0]
    assert windows(read(tmp_path, "Qwen3Moe", sliding_window=9, use_sliding_window=True)) == [9, 9, 9, 9]
    assert windows(read(tmp_path, "GptOss", sliding_window=9)) == [9, 0, 9, 0]
    kinds = ["full_attention", "sliding_attention"] * 2
    assert windows(read(tmp_path, "Gemma2", sliding_window=9, layer_types=kinds)) == [0, 9, 0, 9]


def num_experts(model: ModelSpec) -> list[int]:
    return [0 if layer.experts is None else layer.experts.num_experts for layer in model.layers]


def test_layers_with_experts(tmp_path: Path) -> None:
    assert num_experts(read(tmp_path, "Mixtral")) == [8] * 4
    assert num_experts(read(tmp_path, "Qwen3Moe", decoder_sparse_step=2, mlp_only_layers=[3])) == [0, 128, 0, 0]
    assert num_experts(read(tmp_path, "Qwen3Moe", num_local_experts=16)) == [16] * 4
    assert num_experts(read(tmp_path, "Glm4Moe", first_k_dense_replace=3)) == [0, 0, 0, 128]
    assert num_experts(read(tmp_path, "Ernie4_5_Moe")) == [0, 64, 64, 64]
    ranges = {"moe_layer_start_index": 0, "moe_layer_end_index": 2, "moe_layer_interval": 2}
    assert num_experts(read(tmp_path, "Ernie4_5_Moe", **ranges)) == [0, 64, 0, 0]


def test_shared_experts(tmp_path: Path) -> None:
    def sizes(family: str, **values: Any) -> list[int]:
        dense = read(tmp_path, family, **values).layers[3].dense
        return [] if dense is None else [dense.size]

    assert sizes("Qwen2Moe") == [5632]
    assert sizes("Glm4Moe", n_shared_experts=2) == [2 * 1408]
    assert sizes("Ernie4_5_Moe") == [2 * 1536]
    assert sizes("GraniteMoeShared", shared_intermediate_size=100) == [100]
    for family, name in (("Glm4Moe", "n_shared_experts"), ("Ernie4_5_Moe", "moe_num_shared_experts")):
        assert sizes(family, **{name: 0}) == []
    assert sizes("GraniteMoeShared") == sizes("Qwen3Moe") == []


def test_layers_that_draft_tokens_are_left_in_the_file(tmp_path: Path) -> None:
    assert read(tmp_path, "Glm4Moe").names.ignored == ("model.layers.4.",)
    assert read(tmp_path, "Glm4Moe", num_nextn_predict_layers=0).names.ignored == ()
    assert read(tmp_path, "Ernie4_5_Moe").names.ignored == ("model.mtp_",)


def test_a_window_that_hides_nothing_is_none(tmp_path: Path) -> None:
    assert windows(read(tmp_path, "Mistral")) == [0, 0, 0, 0]
    assert windows(read(tmp_path, "Mistral", sliding_window=1024)) == [0, 0, 0, 0]
    assert windows(read(tmp_path, "Mistral", sliding_window=1023)) == [1023] * 4
    # The layers that have it are still those that rotate.
    cohere = read(tmp_path, "Cohere2")
    assert [layer.attention.rope is not None for layer in cohere.layers] == [True, True, True, False]


def test_rope_by_layer(tmp_path: Path) -> None:
    def thetas(family: str, **values: Any) -> list[tuple[str, float]]:
        model = read(tmp_path, family, sliding_window=9, **values)
        return [(rope.type, rope.theta) for rope in model.ropes]

    linear = {"rope_type": "linear", "factor": 8.0}
    assert thetas("Gemma3", sliding_window_pattern=2) == [("default", 10_000.0), ("default", 1_000_000.0)]
    old = {"rope_theta": 5.0, "rope_local_base_freq": 3.0, "rope_scaling": linear, "sliding_window_pattern": 2}
    assert thetas("Gemma3", **old) == [("default", 3.0), ("linear", 5.0)]
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}
    assert thetas("Olmo3", rope_theta=7.0, rope_scaling=yarn) == [("default", 7.0), ("yarn", 7.0)]
    assert thetas("Olmo3", rope_parameters=NESTED) == [("default", 500_000.0)]


@pytest.mark.parametrize(
    "values",
    [
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}},
        {"rope_parameters": {"full_attention": {"rope_theta": 5.0}, "sliding_attention": None}},
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3.0}}},
        {
            "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5.0}},
            "rope_scaling": {"factor": 4.0},
        },
    ],
)
@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Olmo3ForCausalLM"])
def test_what_is_not_said_of_a_kind_of_layer_is_what_transformers_assumes(
    architecture: str, values: dict[str, Any], tmp_path: Path
) -> None:
    import transformers

    kinds = ["full_attention", "sliding_attention"] * 2
    family, sizes = architecture.removesuffix("ForCausalLM"), SIZES | {"layer_types": kinds, "sliding_window": 9}
    found = read(tmp_path, family, **sizes | values)
    config_class = getattr(transformers, architecture).config_class
    complete = config_class(**sizes | json.loads(json.dumps(values))).to_dict()
    assert found == read(tmp_path, family, **complete | {"architectures": [architecture]})


def test_heads_of_gemma_4_without_a_window(tmp_path: Path) -> None:
    """As its first config.json files say it, and as transformers 5 saves them."""
    kinds = ["sliding_attention", "full_attention"] * 2
    shared = {"layer_types": kinds, "attention_k_eq_v": True, "num_kv_shared_layers": 2, "head_dim": 16}
    old = read(tmp_path, "Gemma4", global_head_dim=32, num_global_key_value_heads=1, **shared)
    own = {"head_dim": 32, "num_key_value_heads": 1}
    assert old == read(tmp_path, "Gemma4", per_layer_config={"1": own, "3": own}, **shared)
    assert old.kv_shapes == ((2, 16), (1, 32), None, None)
    assert [layer.attention.keys_of for layer in old.layers] == [-1, -1, 0, 1]
    assert [layer.attention.values_are_keys for layer in old.layers] == [False, True, False, False]
    assert [(rope.type, rope.rotary_dim, rope.num_pairs) for rope in old.ropes] == [
        *(("default", 16, 0), ("proportional", 32, 4)),
    ]
    assert read(tmp_path, "Gemma4", global_head_dim=32, num_global_key_value_heads=1).kv_shapes[3] == (2, 32)


def test_activations_of_the_first_gemma(tmp_path: Path) -> None:
    """Early config.json files said `gelu` and meant the approximation."""
    for values in ({}, {"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}):
        model = read(tmp_path, "Gemma", **values)
        assert model.layers[0].feed_forward.activation == "gelu_tanh"
    assert read(tmp_path, "Gemma", hidden_activation="silu").layers[0].feed_forward.activation == "silu"


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope type dynamic is not supported"),
        ("Llama", {"rope_scaling": {"rope_type": "dynamic"}, "rope_parameters": {}}, "(supported: default, linear, "),
        ("Llama", {"rope_parameters": {"rope_type": "linear"}}, "rope type linear needs factor"),
        ("Llama", {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "llama3 needs low_freq_factor"),
        ("Phi3", {"rope_scaling": {"rope_type": "longrope"}}, "rope type longrope needs short_factor"),
        ("Phi3", {"rope_scaling": {**LONG, "long_factor": [2.0]}}, "short_factor and long_factor need 4 numbers each"),
        ("Phi3", {"rope_scaling": {**LONG, "long_factor": [0] * 4}}, "rope_scaling.long_factor"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "linear", "factor": "two"}},
            "rope_parameters.factor: Expected `float | null`, got `str`",
        ),
        ("Llama", {"rope_scaling": {"rope_theta": [1]}}, "rope_scaling.rope_theta: Expected `float | null`"),
        ("Llama", {"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters.rope_type: Expected `str | null`"),
        ("Llama", {"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta: Expected `float` > 1"),
        ("Llama", {"rope_scaling": {"original_max_position_embeddings": 1}}, "Expected `int` >= 2"),
        ("Llama", {"rope_parameters": NESTED}, "rope_parameters differ by layer"),
        ("Gemma3", {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters needs full_attention and sliding"),
        ("Ministral3", {"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters needs llama_4_scaling_beta"),
        ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ("Phi", {"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 is not supported"),
        ("Phi", {"partial_rotary_factor": 0.4}, "3 elements of a head are rotated; it must be an even number"),
        ("Llama", {"num_key_value_heads": 3}, "num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
        ("Llama", {"head_dim": 7}, "head_dim is 7; rotary embeddings need an even one"),
        ("Llama", {"hidden_act": "xielu"}, "hidden_act xielu is not supported (supported: silu, "),
        ("Gemma2", {"hidden_activation": "quick_gelu"}, "hidden_act quick_gelu is not supported"),
        ("Mistral", {"sliding_window": 0}, "sliding_window: Expected `int` >= 1"),
        ("Mistral", {"layer_types": ["linear_attention"] * 4}, "layer_types: linear_attention is not supported"),
        ("Llama", {"layer_types": ["mamba"] * 4}, "layer_types: mamba is not supported"),
        ("Mistral", {"layer_types": ["full_attention"]}, "layer_types has 1 entries, num_hidden_layers is 4"),
        ("Ministral3", {"layer_types": ["sliding_attention"] * 4, "rope_parameters": {"llama_4_scaling_beta": 0.1}},
         "layer_types has sliding_attention, and sliding_window is null"),
        ("Qwen2", {"layer_types": ["sliding_attention"] * 4}, "and use_sliding_window is false"),
        ("Phi3", {"layer_types": ["full_attention"] * 4, "sliding_window": 9},
         "layer_types has full_attention, and sliding_window 9 is that of all layers"),
        ("Olmo2", {"layer_types": ["sliding_attention"] * 4, "sliding_window": 9}, "which this architecture does not"),
        ("SmolLM3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries, num_hidden_layers is 4"),
        ("Exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern LLLG is not supported without layer_"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
        ("Llama", {"attention_chunk_size": 8192}, "attention_chunk_size 8192 is not supported"),
        ("Olmo", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
        ("Cohere", {"use_qk_norm": True}, "use_qk_norm True is not supported"),
        ("Phi", {"qk_layernorm": True}, "qk_layernorm True is not supported"),
        ("StableLm", {"qk_layernorm": True}, "qk_layernorm True is not supported"),
        ("Granite", {"logits_scaling": 0}, "logits_scaling: Expected `float` > 0"),
        ("Mixtral", {"num_experts_per_tok": 9}, "9 experts for a token is not supported, of 8"),
        ("Mixtral", {"num_local_experts": 0}, "num_local_experts: Expected `int` >= 1"),
        ("Olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
        ("Olmoe", {"num_experts": "many"}, "num_experts: Expected `int`, got `str`"),
        ("Qwen3Moe", {"num_local_experts": 4}, "8 experts for a token is not supported, of 4"),
        ("Qwen2Moe", {"layer_types": ["sliding_attention"] * 4}, "and use_sliding_window is false"),
        ("Glm4Moe", {"n_group": 3}, "1 of 3 groups of 128 experts is not supported"),
        ("Glm4Moe", {"n_group": 128, "topk_group": 8}, "8 of 128 groups of 128 experts is not supported"),
        ("Glm4Moe", {"n_group": 2, "topk_group": 3}, "3 of 2 groups of 128 experts is not supported"),
        ("Glm4Moe", {"n_group": 32, "topk_group": 1}, "8 experts for a token is not supported, of 128 in 1 of 32 "),
        ("GptOss", {"swiglu_limit": 10.0}, "swiglu_alpha 1.702, swiglu_limit 10.0 is not supported"),
        ("Gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention all is not supported"),
        ("Gemma4", {"num_kv_shared_layers": 4}, "num_kv_shared_layers 4 leaves no layer of sliding_attention before"),
        ("Gemma4", {"num_kv_shared_layers": 9}, "num_kv_shared_layers 9 leaves no layer of sliding_attention before"),
        ("Gemma4", {"num_kv_shared_layers": 1}, "leaves no layer of full_attention before layer 3 with keys of its"),
        ("Gemma4", {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 4,
                    "per_layer_config": {"3": {"head_dim": 64}}},
         "layer 3 has 2 key-value heads of 64, and layer 2, whose keys it attends to, 2 of 256"),
        ("Gemma4", {"per_layer_config": {"2": {"intermediate_size": 5}}}, "per_layer_config.2.intermediate_size is"),
        ("Gemma4", {"per_layer_config": {"2": {"head_dim": 0}}}, "per_layer_config.2.head_dim is 0, and must be"),
        ("Gemma4", {"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input 99 is less than vocab_size 100"),
        ("Gemma4", {"enable_moe_block": True}, "enable_moe_block needs num_experts, top_k_experts and moe_interm"),
        ("Gemma4", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
         "5 experts for a token is not supported, of 4"),
        ("Gemma4", {"global_head_dim": 31}, "head_dim is 31; rotary embeddings need an even one"),
        ("Gemma4", {"num_global_key_value_heads": 3, "attention_k_eq_v": True}, "a multiple of num_key_value_heads 3"),
        ("Gemma4", {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}}},
         "partial_rotary_factor 2.0 is not supported"),
        ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 1e306}}, "factor: Expected `float` <= 1048576"),
        ("Phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 1}, "Expected `int` >= 2"),
        ("Llama", {"rope_scaling": {"rope_type": "yarn", "mscale_all_dim": -8, "mscale": 1}}, "mscale_all_dim: Exp"),
        ("Llama", {"rope_scaling": {"rope_type": "yarn", "beta_fast": -1}}, "rope_scaling.beta_fast: Expected"),
        ("Llama", {"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 1}, "rope_theta: Expected `float` > 1"),
        ("Llama", {"rope_scaling": {"rope_type": "llama3", "factor": 4, "low_freq_factor": 4, "high_freq_factor": 4}},
         "low_freq_factor 4.0 is not below high_freq_factor"),
        ("Granite", {"attention_multiplier": 0}, "attention_multiplier: Expected `float` > 0"),
        ("Llama", {"num_hidden_layers": 10**9}, "num_hidden_layers: Expected `int` <= 1024"),
        ("Llama", {"hidden_size": 10**9}, "hidden_size: Expected `int` <= 1048576"),
        ("Qwen3Moe", {"num_experts": 10**9}, "num_experts: Expected `int` <= 4096"),
        ("Qwen3Moe", {"num_experts": 4096, "num_hidden_layers": 1024}, "all layers together have 4194304 experts"),
        ("Glm4Moe", {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers: Expected `int` <= 1024"),
        ("GptOss", {"quantization_config": {"quant_method": "hqq"}}, "quantized (quantization_config: hqq)"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_refused(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, family, **changes)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_config_json_leaves_out_is_what_transformers_assumes(architecture: str, tmp_path: Path) -> None:
    """A config.json of sizes alone means the same as the one with everything that transformers makes of it."""
    import transformers

    # A multiple of every default number of key-value heads.
    sizes = SIZES | {"num_attention_heads": 160, "hidden_size": 1280, "num_key_value_heads": None}
    if architecture == "Ministral3ForCausalLM":
        sizes["rope_parameters"] = {"llama_4_scaling_beta": 0.1}
    sizes = {name: value for name, value in sizes.items() if value is not None}
    family = architecture.removesuffix("ForCausalLM")
    short = read(tmp_path, family, num_key_value_heads=None, **sizes)
    complete = getattr(transformers, architecture).config_class(**sizes).to_dict()
    assert short == read(tmp_path, family, **complete | {"architectures": [architecture]})


def test_decoders_of_multimodal_models_are_known() -> None:
    for multimodal in MULTIMODAL.values():
        assert set(multimodal.decoders.values()) <= FAMILIES.keys()
