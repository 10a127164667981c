"""Tiny checkpoints whose matrices are quantized, with the tensors and the config.json that the usual tools write.

Codes are packed by numpy, and each matrix comes with the numbers that the tool's own library makes of them, by its
formula.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoints import edit_json
from tests.models.families.proof import SMALL, make_checkpoint

#: No multiple of 128 inputs.
FIELDS: dict[str, Any] = SMALL | {"hidden_size": 128, "intermediate_size": 320, "initializer_range": 0.08}

Tensors = dict[str, Tensor]


class Quantized(NamedTuple):
    """The parts of a matrix by the ends of their names, and its numbers, float32 [out, in]."""

    parts: Tensors
    values: Tensor


Pack = Callable[[np.ndarray, np.random.Generator], Quantized]


class Case(NamedTuple):
    """A `quantization_config`, and how the matrix of a module is packed; None: it stays as it is."""

    config: dict[str, Any]
    pack_of: Callable[[str], Pack | None]


def int32_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [..., n] as words of 32 bits, the first lowest, zeros after the last."""
    per_word = 32 // bits
    padded = np.pad(codes.astype(np.uint32), [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per_word)])
    grouped = padded.reshape(*codes.shape[:-1], -1, per_word)
    return np.bitwise_or.reduce(grouped << np.arange(0, 32, bits, dtype=np.uint32), axis=-1).view(np.int32)


def rounded(weight: np.ndarray, groups_I: np.ndarray, bits: int, *, is_symmetric: bool, dtype: torch.dtype) -> Any:
    """Codes [out, in], and scales and zeros [out, groups] of a round to nearest, the scales rounded to `dtype`."""
    num_groups = groups_I.max() + 1
    least = np.stack([weight[:, groups_I == group].min(1) for group in range(num_groups)], axis=1)
    most = np.stack([weight[:, groups_I == group].max(1) for group in range(num_groups)], axis=1)
    levels = (1 << bits) - 1
    if is_symmetric:
        scales = 2 * np.maximum(-least, most) / levels
        zeros = np.full(scales.shape, 1 << (bits - 1))
    else:
        scales = (np.maximum(most, 0) - np.minimum(least, 0)) / levels
        zeros = np.clip(np.round(-np.minimum(least, 0) / scales), 0, levels - 1).astype(np.int64)
    scales = torch.from_numpy(scales).to(dtype)
    spread = scales.double().numpy()[:, groups_I]
    codes = np.clip(np.round(weight / spread) + zeros[:, groups_I], 0, levels).astype(np.int64)
    return codes, scales, zeros


def numbers(codes: np.ndarray, scales: Tensor, zeros: np.ndarray, groups_I: np.ndarray) -> Tensor:
    """`(code - zero) * scale` in the dtype of the scales."""
    integers = torch.from_numpy(codes - zeros[:, groups_I]).to(scales.dtype)
    return (integers.double() * scales.double()[:, groups_I]).to(scales.dtype).float()


def gptq(bits: int, size: int, *, version: int = 1, is_symmetric: bool = False, desc_act: bool = False) -> Pack:
    def pack(weight: np.ndarray, rng: np.random.Generator) -> Quantized:
        num_in = weight.shape[1]
        groups = np.arange(num_in) // (size if size > 0 else num_in)
        if desc_act:
            rng.shuffle(groups)
        codes, scales, zeros = rounded(weight, groups, bits, is_symmetric=is_symmetric, dtype=torch.float16)
        parts = {
            "qweight": int32_words(codes, bits).T,
            "qzeros": int32_words((zeros - (version == 1)).T, bits),
            "g_idx": groups.astype(np.int32),
        }
        if version == 1:
            # The first versions of AutoGPTQ wrote a bias in any case.
            parts["bias"] = np.zeros(len(weight), np.float16)
        tensors = {name: torch.from_numpy(part.copy()) for name, part in parts.items()}
        return Quantized(tensors | {"scales": scales.t()}, numbers(codes, scales, zeros, groups))

    # A zero of 0 cannot be stored less one.
    def checked(weight: np.ndarray, rng: np.random.Generator) -> Quantized:
        return pack(np.where(np.arange(weight.shape[1]) % 7 == 0, -np.abs(weight), weight), rng)

    return checked


def awq(size: int) -> Pack:
    def pack(weight: np.ndarray, rng: np.random.Generator) -> Quantized:
        groups = np.arange(weight.shape[1]) // size
        codes, scales, zeros = rounded(weight, groups, 4, is_symmetric=False, dtype=torch.float16)

        def words(values: np.ndarray) -> Tensor:
            of_words = values.reshape(len(values), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
            return torch.from_numpy(int32_words(of_words.reshape(values.shape), 4).copy())

        parts = {"qweight": words(codes.T), "qzeros": words(zeros.T), "scales": scales.t()}
        return Quantized(parts, numbers(codes, scales, zeros, groups))

    return pack


def packed(bits: int, size: int, *, is_symmetric: bool = True, is_ordered: bool = False) -> Pack:
    def pack(weight: np.ndarray, rng: np.random.Generator) -> Quantized:
        num_in = weight.shape[1]
        groups = np.arange(num_in) // (size or num_in)
        if is_ordered:
            rng.shuffle(groups)
        codes, scales, zeros = rounded(weight, groups, bits, is_symmetric=is_symmetric, dtype=torch.bfloat16)
        parts = {
            "weight_packed": torch.from_numpy(int32_words(codes, bits)),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            parts["weight_zero_point"] = torch.from_numpy(int32_words(zeros.T, bits).T.copy())
        if is_ordered:
            parts["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return Quantized(parts, numbers(codes, scales, zeros, groups))

    return pack


def int8(by: str, *, is_symmetric: bool = True) -> Pack:
    def pack(weight: np.ndarray, rng: np.random.Generator) -> Quantized:
        rows = weight.reshape(1, -1) if by == "tensor" else weight
        groups = np.zeros(rows.shape[1], np.int64)
        codes, scales, zeros = rounded(rows, groups, 8, is_symmetric=is_symmetric, dtype=torch.bfloat16)
        values = numbers(codes, scales, zeros, groups).view(weight.shape)
        parts = {
            "weight": torch.from_numpy((codes - 128).astype(np.int8).reshape(weight.shape)),
            "weight_scale": scales.view(-1) if by == "tensor" else scales,
        }
        if not is_symmetric:
            parts["weight_zero_point"] = torch.from_numpy((zeros - 128).astype(np.int8)).view(
                parts["weight_scale"].shape
            )
        return Quantized(parts, values)

    return pack


def fp8(block: tuple[int, int], *, scale: str, dtype: torch.dtype = torch.float32, extra: str = "") -> Pack:
    """block: outputs and inputs of one; 0: all."""

    def pack(weight: np.ndarray, rng: np.random.Generator) -> Quantized:
        matrix = torch.from_numpy(weight).float()
        rows, columns = (size or all_ for size, all_ in zip(block, weight.shape, strict=True))
        numbers_O, numbers_I = torch.arange(weight.shape[0]) // rows, torch.arange(weight.shape[1]) // columns
        scales = torch.zeros(int(numbers_O.max()) + 1, int(numbers_I.max()) + 1)
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                scales[row, column] = matrix[numbers_O == row][:, numbers_I == column].abs().max() / 448
        scales = scales.to(dtype)
        spread = scales.float()[numbers_O][:, numbers_I]
        codes = (matrix / spread).to(torch.float8_e4m3fn)
        values = codes.float() * spread
        if dtype != torch.float32:
            # As compressed-tensors does.
            values = values.to(dtype).float()
        parts = {"weight": codes, scale: scales if any(block) else scales[0, 0]}
        return Quantized(parts | ({extra: torch.tensor(0.5)} if extra else {}), values)

    return pack


FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def fp4_codes(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, Tensor]:
    """Pairs of codes [out, in / 2] and powers [out, in / 32], both uint8, and the numbers."""
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    powers = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    units = groups / 2.0 ** powers[..., None]
    codes = np.abs(np.abs(units)[..., None] - np.array(FP4)).argmin(-1)
    values = np.array(FP4)[codes] * np.where(units < 0, -1, 1) * 2.0 ** powers[..., None]
    codes = (codes | np.where(units < 0, 8, 0)).astype(np.uint8).reshape(weight.shape)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    return pairs, (powers + 127).astype(np.uint8), torch.from_numpy(values.reshape(weight.shape)).float()


def mxfp4(weight: np.ndarray, rng: np.random.Generator) -> Quantized:
    pairs, powers, values = fp4_codes(weight)
    return Quantized({"weight_packed": torch.from_numpy(pairs), "weight_scale": torch.from_numpy(powers)}, values)


def compressed(format_: str, weights: dict[str, Any], **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True} | weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "quantization_status": "compressed",
        **changes,
    }


def everywhere(pack: Pack) -> Callable[[str], Pack]:
    return lambda module: pack


def of_gptq(bits: int, size: int, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": False, "desc_act": False} | changes


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
MIXED = compressed("mixed-precision", {}, ignore=["lm_head", "re:.*k_proj", "model.layers.1.self_attn.q_proj"])
MIXED["config_groups"] = {
    "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}, "format": "pack-quantized"},
    "group_1": {"targets": ["re:.*down_proj"], "weights": {"strategy": "channel"}, "format": "int-quantized"},
    "group_2": {
        "targets": ["model.layers.0.mlp.down_proj"],
        "weights": {"type": "float", "strategy": "channel"},
        "format": "float-quantized",
    },
}


def of_mixed(module: str) -> Pack | None:
    if module.endswith("k_proj") or module == "model.layers.1.self_attn.q_proj":
        return None
    if module == "model.layers.0.mlp.down_proj":
        return fp8((1, 0), scale="weight_scale", dtype=torch.bfloat16)
    return int8("channel") if module.endswith("down_proj") else packed(4, 32)


def of_dynamic(module: str) -> Pack | None:
    if module.endswith("up_proj"):
        return None
    return gptq(8, 32, version=2) if ".1.mlp" in module else gptq(4, 128, version=2)


CASES: dict[str, Case] = {
    "gptq": Case(of_gptq(4, 128, sym=True), everywhere(gptq(4, 128, is_symmetric=True))),
    "gptq, zeros": Case(of_gptq(4, 32), everywhere(gptq(4, 32))),
    "gptq, 8 bits, one group": Case(of_gptq(8, -1, checkpoint_format="gptq_v2"), everywhere(gptq(8, -1, version=2))),
    "gptq, groups in an order": Case(of_gptq(4, 64, desc_act=True), everywhere(gptq(4, 64, desc_act=True))),
    "gptq, modules with other settings": Case(
        of_gptq(
            4,
            128,
            format="gptq_v2",
            dynamic={r"-:.*\.up_proj": {}, r"+:.*\.1\.mlp\.": {"bits": 8, "group_size": 32}},
        ),
        of_dynamic,
    ),
    "awq": Case(AWQ | {"modules_to_not_convert": ["v_proj"]}, lambda m: None if m.endswith("v_proj") else awq(64)),
    "packed": Case(compressed("pack-quantized", {"num_bits": 4, "group_size": 64}), everywhere(packed(4, 64))),
    "packed, zeros": Case(
        compressed("pack-quantized", {"num_bits": 4, "group_size": 32, "symmetric": False, "strategy": "group"}),
        everywhere(packed(4, 32, is_symmetric=False)),
    ),
    "packed, 8 bits by channel": Case(
        compressed("pack-quantized", {"num_bits": 8, "strategy": "channel"}), everywhere(packed(8, 0))
    ),
    "packed, groups in an order": Case(
        compressed("pack-quantized", {"num_bits": 4, "group_size": 64, "actorder": "group"}),
        everywhere(packed(4, 64, is_ordered=True)),
    ),
    "int8": Case(compressed("int-quantized", {"num_bits": 8, "strategy": "channel"}), everywhere(int8("channel"))),
    "int8, zeros": Case(
        compressed("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
        everywhere(int8("channel", is_symmetric=False)),
    ),
    "int8 by tensor": Case(
        compressed("naive-quantized", {"num_bits": 8, "strategy": "tensor"}), everywhere(int8("tensor"))
    ),
    "float8 by channel": Case(
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        everywhere(fp8((1, 0), scale="weight_scale", dtype=torch.bfloat16)),
    ),
    "float8 by block": Case(
        compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        ),
        everywhere(fp8((128, 128), scale="weight_scale", dtype=torch.bfloat16)),
    ),
    "mxfp4": Case(
        compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
        everywhere(mxfp4),
    ),
    "mixed": Case(MIXED, of_mixed),
    "fp8 by block": Case(
        FP8 | {"weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn"]},
        lambda m: None if ".0.self_attn" in m else fp8((128, 128), scale="weight_scale_inv"),
    ),
    "fp8 by tensor": Case(
        FP8 | {"activation_scheme": "static", "ignored_layers": ["lm_head"]},
        everywhere(fp8((0, 0), scale="weight_scale", extra="input_scale")),
    ),
    "fp8 by channel": Case(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        everywhere(fp8((1, 0), scale="weight_scale", extra="input_scale_ub")),
    ),
}


def write_quantized(
    folder: Path, case: Case, architecture: str = "LlamaForCausalLM", **fields: Any
) -> tuple[Any, dict[str, Tensor]]:
    """A checkpoint in a case's format. Returns transformers' model of its numbers, in float32, and the numbers by
    module.

    The parts of a matrix lie in two files. fields: of the config, beside FIELDS.
    """
    model = make_checkpoint(folder, architecture, **FIELDS | fields)
    rng = np.random.default_rng(1)
    tensors: Tensors = {}
    values: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            module = name.removesuffix(".weight")
            pack = case.pack_of(module) if "_proj" in name and weight.dim() == 2 else None
            if pack is None:
                tensors[name] = weight.bfloat16()
                continue
            quantized = pack(weight.double().numpy(), rng)
            values[module] = quantized.values
            weight.copy_(quantized.values)
            tensors |= {f"{module}.{part}": tensor for part, tensor in quantized.parts.items()}
    save(folder, tensors, case.config)
    return model, values


def write_fp8_experts(folder: Path, *, is_stacked: bool) -> Any:
    """A Qwen3-MoE in FP8 by blocks: each expert has its tensors, or all of a layer, as transformers 5 keeps them.

    Returns transformers' model of its numbers, in float32.
    """
    fields = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32}
    model = make_checkpoint(folder, "Qwen3MoeForCausalLM", **FIELDS | fields)
    rng, pack = np.random.default_rng(1), fp8((128, 128), scale="weight_scale_inv")
    tensors: Tensors = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".experts." not in name:
                tensors[name] = weight.bfloat16()
                continue
            quantized = [pack(matrix, rng) for matrix in weight.double().numpy()]
            weight.copy_(torch.stack([one.values for one in quantized]))
            if is_stacked:
                parts = {part: torch.stack([one.parts[part] for one in quantized]) for part in quantized[0].parts}
                tensors |= {name: parts["weight"], f"{name}_scale_inv": parts["weight_scale_inv"]}
                continue
            stem, _, last = name.rpartition(".")
            for number, one in enumerate(quantized):
                names = ["gate_proj", "up_proj"] if last == "gate_up_proj" else ["down_proj"]
                for part, whole in one.parts.items():
                    halves = zip(names, whole.chunk(len(names)), strict=True)
                    tensors |= {f"{stem}.{number}.{own}.{part}": half for own, half in halves}
    save(folder, tensors, FP8 | {"weight_block_size": [128, 128]})
    return model


def write_expert_stacks(folder: Path, case: Case) -> dict[str, Tensor]:
    """A Qwen3-MoE in a case's format, with the experts of a layer in `.weight` and `.weight_scale`.

    Returns the numbers of these, float32 [experts, out, in], by module.
    """
    fields = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32}
    model = make_checkpoint(folder, "Qwen3MoeForCausalLM", **FIELDS | fields)
    rng = np.random.default_rng(1)
    tensors: Tensors = {}
    values: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        pack = case.pack_of(name) if ".experts." in name else None
        if pack is None:
            tensors[name] = weight.detach().bfloat16()
            continue
        quantized = [pack(matrix, rng) for matrix in weight.detach().double().numpy()]
        values[name] = torch.stack([one.values for one in quantized])
        for part in ("weight", "weight_scale"):
            tensors[f"{name}.{part}"] = torch.stack([one.parts[part] for one in quantized])
    save(folder, tensors, case.config)
    return values


def save(folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    """Tensors in two files, and the config."""
    names = {name: f"model-{1 + ('scale' in name or 'zero' in name)}.safetensors" for name in tensors}
    for file in set(names.values()):
        own = {name: tensor.contiguous() for name, tensor in tensors.items() if names[name] == file}
        save_file(own, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    edit_json(folder / "config.json", quantization_config=config)


def write_gpt_oss(folder: Path) -> Any:
    """A gpt-oss as OpenAI published it: the experts of a layer in one tensor, with the rows of gate and up in turns.

    Returns transformers' model of its numbers, in float32.
    """
    fields = SMALL | {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16}
    model = make_checkpoint(folder, "GptOssForCausalLM", **fields)
    tensors: Tensors = {}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.endswith(("gate_up_proj", "down_proj")):
                tensors[name] = weight.bfloat16()
                continue
            pairs, powers, values = fp4_codes(weight.transpose(1, 2).double().numpy())
            weight.copy_(values.transpose(1, 2))
            blocks = torch.from_numpy(pairs).unflatten(-1, (-1, 16))
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": torch.from_numpy(powers)}
    ignored = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    save(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ignored})
    return model
