"""GGUF files of tiny models, made of Hugging Face checkpoints as llama.cpp's converter makes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import ExpertGatingFuncType, GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType
from gguf.constants import MODEL_ARCH_NAMES
from safetensors.torch import load_file
from torch import Tensor

#: Architectures in whose files the rows of queries and keys are in another order.
INTERLEAVED = ("arcee", "granite", "granitemoe", "llama", "mistral3", "olmo", "smollm3")
NORMS_PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe")
#: Those whose value heads are in another order: that of each key head's first, second, and so on.
INTERLEAVED_VALUES = ("qwen35", "qwen35moe")
#: Tensors of layers of Gemma 4 that gguf-py has no name for.
_SCALES = {"router.scale": "blk.{bid}.ffn_gate_inp.scale", "router.per_expert_scale": "blk.{bid}.ffn_down_exps.scale"}
#: SentencePiece's, of bytes alone.
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]


def to_gguf(
    folder: Path,
    file: Path,
    architecture: str,
    kind: str = "F32",
    *,
    num_parts: int = 1,
    tokenizer: dict[str, Any] | None = None,
    is_fused: bool = False,
) -> None:
    """Write the checkpoint in `folder` as a GGUF file whose matrices have this type.

    is_fused: the gates of layers with a state stay in a matrix with queries, keys and values, as they did at first.
    tokenizer: keys after `tokenizer.ggml`; by default those of SentencePiece with tokens for all bytes.
    """
    config = json.loads((folder / "config.json").read_text())
    tensors = with_split_experts(load_file(folder / "model.safetensors"), architecture)
    tensors = of_hybrid(tensors, architecture, config, is_fused=is_fused)
    writer = GGUFWriter(
        file, architecture, split_max_tensors=-(-(len(tensors) + 1) // num_parts) if num_parts > 1 else 0
    )
    add_metadata(writer, architecture, config)
    tokenizer = tokenizer or tokenizer_of_bytes(config["vocab_size"])
    add_keys(writer, {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()})
    architectures = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[architecture], config["num_hidden_layers"])
    for name, stored in tensors.items():
        target = _SCALES.get(name.split(".", 3)[-1]) or names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        target = target.replace("{bid}", name.split(".")[2] if "{bid}" in target else "")
        values = stored.float().numpy()
        if architecture in NORMS_PLUS_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
            values = values + 1
        if architecture in INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        is_float32 = (
            values.ndim == 1
            or "ffn_gate_inp" in target
            or target.endswith(".bias")
            or "conv1d" in name
            or "conv.conv." in name
        )
        if "shared_expert_gate" in name:
            values = values.squeeze()
        type_ = GGMLQuantizationType.F32 if is_float32 else GGMLQuantizationType[kind]
        writer.add_tensor(target, gguf.quantize(np.ascontiguousarray(values), type_), raw_dtype=type_)
    for name, factors in rope_factors(config).items():
        writer.add_tensor(f"{name}.weight", np.array(factors, np.float32))
    finish(writer)


def with_split_experts(tensors: dict[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """The same with all experts of a layer in one tensor of gate, one of up and one of down, [experts, out, in]."""
    if architecture == "gemma4":
        # Gate and up of an expert follow one another.
        alone = ("layer_scalar", ".experts.gate_up_proj", ".experts.down_proj")
        return {f"{name}.weight" if name.endswith(alone) else name: values for name, values in tensors.items()}
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, values in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)(\..*)", name):
            experts.setdefault(match[1] + match[3], {})[int(match[2])] = values
        elif name.endswith("e_score_correction_bias"):
            found[name.replace("_correction_bias", "_correction.bias").replace("gate.moe_", "moe_")] = values.flatten()
        elif name.endswith("sinks"):
            found[f"{name}.weight"] = values
        elif architecture == "gpt-oss" and "gate_up_proj" in name:
            # Gate and up in turns; matrices lie transposed.
            for part, one in enumerate(("gate", "up")):
                half = values[..., part::2]
                suffix = ".bias" if name.endswith("_bias") else ".weight"
                stem = name.removesuffix("_bias").replace("gate_up", one)
                found[stem + suffix] = half if half.dim() == 2 else half.transpose(1, 2)
        elif architecture == "gpt-oss" and ".experts.down_proj" in name:
            is_bias = name.endswith("_bias")
            found[name.removesuffix("_bias") + (".bias" if is_bias else ".weight")] = (
                values if is_bias else values.transpose(1, 2)
            )
        elif "input_linear" in name or ".experts.gate_up_proj" in name:
            stem = "mlp.shared_expert" if "shared_mlp" in name else "mlp.experts"
            gate, up = values.chunk(2, dim=-2)
            layer = name.split(".")[2]
            found[f"model.layers.{layer}.{stem}.gate_proj.weight"] = gate
            found[f"model.layers.{layer}.{stem}.up_proj.weight"] = up
        elif ".experts.down_proj" in name or "block_sparse_moe.output_linear" in name:
            found[f"model.layers.{name.split('.')[2]}.mlp.experts.down_proj.weight"] = values
        else:
            found[name] = values
    stacked = {name: torch.stack([one[number] for number in range(len(one))]) for name, one in experts.items()}
    return found | stacked


def of_hybrid(
    tensors: dict[str, Tensor], architecture: str, config: dict[str, Any], *, is_fused: bool
) -> dict[str, Tensor]:
    """The same with what the converter does to layers that keep a state."""
    found: dict[str, Tensor] = {}
    for name, values in tensors.items():
        if "linear_attn" in name and architecture in INTERLEAVED_VALUES:
            values = with_interleaved_values(name, values, config)
        if name.endswith("A_log"):
            found[name] = -values.exp()
        elif name.endswith("dt_bias"):
            found[name.replace("dt_bias", "dt_proj.bias")] = values
        elif "conv1d" in name or "conv.conv.weight" in name:
            found[name] = values.squeeze(1)
        elif name.endswith("in_proj_qkvz.weight") and not is_fused:
            # The rows of each key head's query, key, values and gates.
            heads, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
            of_values = config["linear_num_value_heads"] * config["linear_value_head_dim"] // heads
            parts = values.unflatten(0, (heads, -1)).split([size, size, of_values, of_values], dim=1)
            queries, keys, own, gates = (part.flatten(0, 1) for part in parts)
            found[name.replace("qkvz", "qkv")] = torch.cat((queries, keys, own))
            found[name.replace("qkvz", "z")] = gates
        elif name.endswith(".expert_bias"):
            found[f"{name}.bias"] = values
        else:
            found[name.replace("model.layers", "layers") if ".feed_forward.experts." in name else name] = values
    return found


def with_interleaved_values(name: str, values: Tensor, config: dict[str, Any]) -> Tensor:
    keys, dim = config["linear_num_key_heads"], config["linear_value_head_dim"]

    def reordered(part: Tensor, axis: int, size: int) -> Tensor:
        heads = part.unflatten(axis, (keys, -1, size))
        return heads.transpose(axis, axis + 1).flatten(axis, axis + 2)

    if "in_proj_qkv." in name or "conv1d" in name:
        first = 2 * keys * config["linear_key_head_dim"]
        return torch.cat((values[:first], reordered(values[first:], 0, dim)))
    if "out_proj" in name:
        return reordered(values, 1, dim)
    if "linear_attn.norm" in name:
        return values
    return reordered(values, 0, dim if "in_proj_z" in name else 1)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    if architecture == "gemma4":
        add_gemma4(writer, config)
        return
    get = config.get
    add_experts(writer, architecture, config)
    head_dim = get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    add_states(writer, architecture, config)
    num_drafting = get("num_nextn_predict_layers") or get("mtp_num_hidden_layers") or 0
    writer.add_block_count(config["num_hidden_layers"] + num_drafting)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if get("intermediate_size") is not None:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    kv_heads = config["num_key_value_heads"]
    is_lfm2 = architecture in ("lfm2", "lfm2moe")
    writer.add_head_count_kv(
        [0 if kind == "conv" else kv_heads for kind in config["layer_types"]] if is_lfm2 else kv_heads
    )
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * (full.get("partial_rotary_factor") or 1)))
    writer.add_rope_freq_base(full.get("rope_theta", 10000.0))
    if "rope_theta" in rope.get("sliding_attention", {}) and architecture == "gemma3":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if is_lfm2:
        writer.add_layer_norm_rms_eps(config["norm_eps"])
    elif architecture == "olmo":
        writer.add_layer_norm_eps(1e-5)
    elif (epsilon := get("layer_norm_eps") or get("norm_epsilon") or get("norm_eps")) is not None:
        writer.add_layer_norm_eps(epsilon)
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if full.get("rope_type") == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    elif full.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        if "attention_factor" in full:
            writer.add_rope_scaling_yarn_attn_factor(full["attention_factor"])
        if "mscale_all_dim" in full:
            writer.add_rope_scaling_yarn_log_mul(full["mscale_all_dim"])
    elif full.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(full["attention_factor"])
    if "llama_4_scaling_beta" in full:
        writer.add_attn_temperature_scale(full["llama_4_scaling_beta"])
    if architecture in ("gemma2", "gemma3", "cohere2", "exaone4", "olmo2", "phi3") and get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        if get("layer_types") and architecture in ("exaone4", "olmo2"):
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if architecture in ("granite", "granitemoe"):
        writer.add_attention_scale(config["attention_multiplier"])
    for field, add in (
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("logit_scale", writer.add_logit_scale),
        ("use_parallel_residual", writer.add_parallel_residual),
    ):
        if get(field) is not None:
            add(config[field])


def add_states(writer: GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    """Of layers that keep one."""
    if "conv_L_cache" in config:
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if "linear_num_key_heads" not in config:
        return
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    if architecture in INTERLEAVED_VALUES:
        writer.add_rope_dimension_sections([2, 1, 1, 0])
    if config.get("mtp_num_hidden_layers"):
        writer.add_nextn_predict_layers(config["mtp_num_hidden_layers"])
        # Of a layer that drafts tokens.
        writer.add_tensor(f"blk.{config['num_hidden_layers']}.nextn.enorm.weight", np.ones(3, np.float32))


def add_gemma4(writer: GGUFWriter, config: dict[str, Any]) -> None:
    num_layers, num_shared, kinds = (
        config[name] for name in ("num_hidden_layers", "num_kv_shared_layers", "layer_types")
    )
    full = next(iter(config["per_layer_config"].values()))
    size, num_own = config["intermediate_size"], num_layers - num_shared
    writer.add_block_count(num_layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    is_double_wide = config["use_double_wide_mlp"]
    writer.add_feed_forward_length([size] * num_own + [2 * size] * num_shared if is_double_wide else size)
    writer.add_head_count(config["num_attention_heads"])
    counts = [
        config["num_key_value_heads"] if kind == "sliding_attention" else full.get("num_key_value_heads")
        for kind in kinds
    ]
    writer.add_head_count_kv(counts if all(counts) else config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(full["head_dim"])
    writer.add_value_length(full["head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(full["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    writer.add_shared_kv_layers(num_shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    if config["final_logit_softcapping"] is not None:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def add_experts(writer: GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    get = config.get
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    count = next((config[name] for name in names if get(name)), None)
    if count is None:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(get("num_experts_per_tok") or config["moe_k"])
    if (size := get("moe_intermediate_size")) is not None:
        writer.add_expert_feed_forward_length(size)
    if size := get("shared_expert_intermediate_size") or get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(size)
    if (shared := get("n_shared_experts") or get("moe_num_shared_experts")) is not None:
        writer.add_expert_shared_count(shared)
    if architecture == "glm4moe":
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_nextn_predict_layers(config["num_nextn_predict_layers"])
        # Of a layer that drafts tokens.
        writer.add_tensor(f"blk.{config['num_hidden_layers']}.nextn.enorm.weight", np.ones(3, np.float32))
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    elif architecture == "ernie4_5-moe":
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    elif architecture == "gpt-oss":
        writer.add_sliding_window(config["sliding_window"])
    elif architecture == "lfm2moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def rope_factors(config: dict[str, Any]) -> dict[str, list[float]]:
    """The tensors that say how rotary embeddings are scaled."""
    rope = config.get("rope_parameters") or {}
    if (full := rope.get("full_attention", {})).get("rope_type") == "proportional":
        num_pairs = next(iter(config["per_layer_config"].values()))["head_dim"] // 2
        num_turning = int(num_pairs * full["partial_rotary_factor"])
        return {"rope_freqs": [1.0] * num_turning + [1e30] * (num_pairs - num_turning)}
    if rope.get("rope_type") == "longrope":
        return {"rope_factors_long": rope["long_factor"], "rope_factors_short": rope["short_factor"]}
    if rope.get("rope_type") != "llama3":
        return {}
    dim, context = config["head_dim"], 8192
    factors = []
    for frequency in rope["rope_theta"] ** -(np.arange(0, dim, 2) / dim):
        length = 2 * np.pi / frequency
        if length < context / rope["high_freq_factor"]:
            factors.append(1.0)
        elif length > context / rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            smooth = (context / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs": factors}


def add_keys(writer: GGUFWriter, values: dict[str, Any]) -> None:
    """Add keys of the types that most files have for such values."""
    for key, value in values.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int() if value < 0:
                writer.add_int64(key, value)
            case int():
                (writer.add_uint32 if value < 1 << 32 else writer.add_uint64)(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)


def tokenizer_of_bytes(vocab_size: int) -> dict[str, Any]:
    tokens = TOKENS[:vocab_size]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * len(tokens),
        "token_type": [*types, *[TokenType.BYTE] * (len(tokens) - len(types))],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def byte_level_keys(folder: Path, split: str) -> dict[str, Any]:
    """The keys for the byte-level tokenizer in a folder, without those of special tokens."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = stored["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token["content"] for token in stored["added_tokens"]}
    return {
        "model": "gpt2",
        "pre": split,
        "tokens": tokens,
        "merges": [" ".join(merge) for merge in stored["model"]["merges"]],
        "token_type": [TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens],
    }
