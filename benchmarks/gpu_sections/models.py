"""Whether models that are unlike Llama and Qwen3, and quantized ones, generate on a GPU what transformers would."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu_harness.engines import start
from benchmarks.gpu_harness.row import Context, Parts, Row
from benchmarks.gpu_sections.correct import BOUNDS, Bounds, Dtype, Sizes, compared, greedily, workload_of
from eventlm.models.quantized.scheme import AWQ_ORDER
from tests.checkpoints import VOCAB_SIZE, make_tokenizer

SIZES = Sizes(num_seqs=12, shared=48, own=40, output=24, max_model_len=128, num_blocks=64)
SMOKE_SIZES = Sizes(num_seqs=2, shared=8, own=8, output=3, max_model_len=32, num_blocks=8)
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.06,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SMOKE_SHAPE = SHAPE | {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
GROUP = 32


class Variant(NamedTuple):
    """A model. fields: of its config, beside the shape."""

    name: str
    architecture: str
    dtype: Dtype
    bounds: Bounds
    fields: dict[str, Any] = {}
    is_awq: bool = False


#: Of random weights, the most likely tokens are near to each other, as experts are.
ROUNDED, ROUTED = Bounds(0.9, 0.05), Bounds(0.9, 0.15)
GEMMA = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
GPT_OSS = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 24}
QWEN_MOE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
CAPS = {"sliding_window": 24, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0}
VARIANTS = (
    Variant("gpt-oss, float32", "GptOssForCausalLM", "float32", BOUNDS["float32"], GPT_OSS),
    Variant("AWQ", "LlamaForCausalLM", "bfloat16", ROUNDED, is_awq=True),
    Variant("Gemma 3", "Gemma3ForCausalLM", "bfloat16", ROUNDED, GEMMA),
    Variant("Gemma 2, float32", "Gemma2ForCausalLM", "float32", BOUNDS["float32"], CAPS),
    Variant("Qwen3-MoE", "Qwen3MoeForCausalLM", "bfloat16", ROUTED, QWEN_MOE),
)
NUM_SMOKE_VARIANTS = 2


def parts(context: Context) -> Parts:
    """Each of the variants."""
    variants = VARIANTS[:NUM_SMOKE_VARIANTS] if context.smoke else VARIANTS
    return {each.name: functools.partial(_compare, context, each) for each in variants}


def _compare(context: Context, variant: Variant) -> Iterator[Row]:
    sizes = SMOKE_SIZES if context.smoke else SIZES
    folder = Path(context.folder) / f"models-{variant.architecture}"
    exact = _make(folder, variant, SMOKE_SHAPE if context.smoke else SHAPE)
    options: dict[str, Any] = {"max_model_len": sizes.max_model_len, "num_blocks": sizes.num_blocks}
    if context.smoke:
        options["max_num_seqs"] = sizes.num_seqs
    with start(context, folder, **options) as llm:
        run = greedily(llm, workload_of(sizes, VOCAB_SIZE))
    yield from compared(variant.name, run, exact, variant.dtype, context.device, variant.bounds)


def _make(folder: Path, variant: Variant, shape: dict[str, Any]) -> Path:
    """Save the model; the folder of what it is compared with, which has the same numbers."""
    import transformers

    torch.manual_seed(0)
    model_class: Any = getattr(transformers, variant.architecture)
    model = model_class(model_class.config_class(**shape | variant.fields))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.empty_like(weight).uniform_(-0.3, 0.3))
            elif name.endswith("bias") or "sinks" in name:
                weight.normal_(std=0.3)
    model = model.to(getattr(torch, variant.dtype))
    parts = _to_awq(model) if variant.is_awq else {}
    exact = folder.with_name(f"{folder.name}-exact") if parts else folder
    model.save_pretrained(exact)
    if parts:
        _save_awq(folder, exact, model, parts)
    make_tokenizer(folder)
    return exact


@torch.no_grad()
def _to_awq(model: Any) -> dict[str, Tensor]:
    """Round the matrices of all layers to 4 bits, in groups of inputs; their parts, by the names of tensors."""
    parts = {}
    for name, module in model.model.layers.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        groups = module.weight.float().unflatten(1, (-1, GROUP))
        least, most = groups.amin(-1), groups.amax(-1)
        scales = ((most - least) / 15).half()
        zeros = (-least / scales.float()).round().clamp(0, 15)
        codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
        module.weight.copy_(((codes - zeros[..., None]) * scales.float()[..., None]).flatten(1))
        prefix = f"model.layers.{name}"
        parts[f"{prefix}.qweight"] = _words(codes.flatten(1).t())
        parts[f"{prefix}.qzeros"] = _words(zeros.t())
        parts[f"{prefix}.scales"] = scales.t().contiguous()
    return parts


def _words(codes: Tensor) -> Tensor:
    """Codes [..., outputs] as words of eight outputs."""
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // 8, dtype=torch.int64)
    for place, output in enumerate(AWQ_ORDER):
        words |= codes[..., output::8].long() << 4 * place
    # Of 32 bits, with a sign.
    return words.sub(1 << 32).where(words >= 1 << 31, words).int()


def _save_awq(folder: Path, exact: Path, model: Any, parts: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    rest = {name: weight for name, weight in model.state_dict().items() if not _is_rounded(name, list(parts))}
    save_file({name: weight.contiguous() for name, weight in (rest | parts).items()}, folder / "model.safetensors")
    config = json.loads((exact / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    (folder / "config.json").write_text(json.dumps(config))


def _is_rounded(name: str, parts: Sequence[str]) -> bool:
    return f"{name.removesuffix('.weight')}.qweight" in parts
