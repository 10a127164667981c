"""Quantized checkpoints on a GPU: what stays codes, and that products are those of the numbers that codes stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eventlm.kernels.gpu.packed_weight import PackedWeight
from eventlm.models import gpu_weights
from eventlm.models.config import read_model
from eventlm.models.fetch.gguf_folder import gguf_folder
from eventlm.models.gpu_weights import GpuWeights, load_gpu_weights
from eventlm.models.weights.find_weights import find_weights
from eventlm.models.weights.matrix_types import gpu_types
from eventlm.models.weights.weight_bytes import gpu_weight_bytes
from tests.checkpoints import make_checkpoint
from tests.models.quantized.checkpoints import CASES, write_gpt_oss, write_quantized
from tests.models.tiny_gguf import TOKENS, write_gguf
from tests.worker.gpu.driven import Asked, Driven, gpu_runner
from tests.worker.gpu.test_runner import GREEDY

#: The weights of a layer by the products that they are parts of, and the size of each.
PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
#: The products that stay codes, by case.
PACKED = {
    # Some queries' values are floats.
    "awq": {"output", "gate_up", "down"},
    "packed, zeros": set(PARTS),
    "packed, groups in an order": set(),
    "gptq, 8 bits, one group": set(PARTS),
    "int8, zeros": set(PARTS),
    "fp8 by block": set(),
}


def load(folder: Path, **options: Any) -> GpuWeights:
    return load_gpu_weights(folder, device=torch.device("cpu"), is_invariant=False, **{"dtype": "float32"} | options)


def packed_of(weights: GpuWeights) -> set[str]:
    return {name for name in PARTS if isinstance(weights.matrix(name, 1), PackedWeight)}


def check_products(weights: GpuWeights, values: dict[str, Tensor], tolerance: float) -> None:
    """Of the second layer. values: by name, without an end."""
    for name, parts in PARTS.items():
        matrix = torch.cat([values[f"model.layers.1.{part}"] for part in parts])
        x = torch.randn(3, matrix.shape[1], generator=torch.Generator().manual_seed(1))
        expected = x @ matrix.t()
        assert (weights.multiply(name, 1, x) - expected).norm() <= tolerance * expected.norm(), name


def test_a_tied_output_matrix_has_no_memory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_model(make_checkpoint(tmp_path, tied=True))
    allocated = []

    def allocate(empty: Tensor, *others: Any) -> Tensor:
        allocated.append(tuple(empty.shape))
        return torch.empty_like(empty, device="cpu")

    monkeypatch.setattr(gpu_weights, "_allocated", allocate)
    weights = GpuWeights(spec, {}, torch.device("cpu"), is_invariant=False)
    assert weights.is_tied
    assert allocated.count((spec.vocab_size, spec.hidden_size)) == 1


@pytest.mark.parametrize("case", PACKED)
def test_products_of_a_case(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = write_quantized(tmp_path, CASES[case])
    weights = load(tmp_path)
    assert packed_of(weights) == PACKED[case]
    said = "quantized matrices whose codes GPUs do not multiply by are widened as they are read: "
    assert (said in capsys.readouterr().err) == (len(PACKED[case]) < len(PARTS))
    # The libraries round their numbers to the type of the scales, float16 or bfloat16.
    state = {name.removesuffix(".weight"): value for name, value in model.state_dict().items()}
    check_products(weights, state, 3e-3)


def test_what_is_widened_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_quantized(tmp_path, CASES["awq"])
    weights = load(tmp_path, dtype="bfloat16")
    assert "widened as they are read: 4 of type awq of 4 bits; they take 0 MiB" in capsys.readouterr().err
    # Codes of 4 bits, and for each 32 of them a scale and a zero.
    assert weights.weight_bytes()["down_proj"] == 2 * 128 * (320 // 2 + 10 * (4 + 2))
    assert weights.weight_bytes()["qkv_proj"] == 2 * 128 * 256 * 2


def test_a_gguf_file_is_run_as_it_is(tmp_path: Path) -> None:
    """Its embedding is widened, which is the output matrix as well."""
    values = write_gguf(tmp_path / "model.gguf")
    folder = gguf_folder(tmp_path / "model.gguf")
    weights = load(folder)
    assert packed_of(weights) == set(PARTS)
    assert torch.equal(weights.embedding, torch.from_numpy(values["model.embed_tokens.weight"]))
    assert weights.is_tied
    check_products(
        weights, {name.removesuffix(".weight"): torch.from_numpy(each) for name, each in values.items()}, 1e-5
    )
    prompt = [token % len(TOKENS) for token in range(40, 49)]
    runner = gpu_runner(folder, max_num_seqs=1, graph_buckets=[1])
    driven = Driven(runner, [Asked(prompt, 3, GREEDY)])
    assert driven.outputs[0] == greedy(values, prompt, 3)


def test_experts_stay_floats_of_4_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_gpt_oss(tmp_path)
    spec = read_model(tmp_path)
    types = gpu_types(find_weights(tmp_path, spec), spec)
    weights = load(tmp_path)
    assert "widened" not in capsys.readouterr().err
    assert (len(types), set(types.values())) == (2 * 3 * 3, {"MXFP4"})
    matrices = 2 * (2 * 96 + 64) * 3 // 2 * 64
    assert gpu_weight_bytes(spec, "float32", {}) - gpu_weight_bytes(spec, "float32", types) > 3 * matrices
    runner = gpu_runner(tmp_path, max_num_seqs=1, graph_buckets=[1])
    prompt = list(range(20, 31))
    (output,) = Driven(runner, [Asked(prompt, 2, GREEDY)]).samples.values()
    with torch.inference_mode():
        assert output == model(torch.tensor([prompt + output[:-1]])).logits[0, -2:].argmax(-1).tolist()
    held = [weights.embedding.nbytes, *weights.weight_bytes().values()]
    others = sum(tensor.nbytes for key, tensor in weights.weights.items() if tensor.dim() == 1 and key.expert < 0)
    biases = sum(tensor.nbytes for key, tensor in weights.weights.items() if tensor.dim() == 1 and key.expert >= 0)
    assert sum(held) + others + biases == gpu_weight_bytes(spec, "float32", types)


@torch.inference_mode()
def greedy(values: dict[str, Any], prompt: list[int], num_tokens: int) -> list[int]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.models import tiny_gguf as tiny

    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=tiny.HIDDEN,
        intermediate_size=tiny.INTERMEDIATE,
        num_hidden_layers=tiny.NUM_LAYERS,
        num_attention_heads=tiny.NUM_HEADS,
        num_key_value_heads=tiny.NUM_KV_HEADS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": tiny.ROPE_THETA},
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config).eval()
    model.load_state_dict({name: torch.from_numpy(each) for name, each in values.items()}, strict=False)
    found = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=[], pad_token_id=0
    )
    return list(found[0, len(prompt) :].tolist())
