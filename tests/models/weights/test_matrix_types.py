"""Which matrices are codes, and that rounding them leaves about the same model."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from eventlm.kernels.cpu.native import available_builds
from eventlm.models.config import read_model
from eventlm.models.fetch.gguf_folder import gguf_folder
from eventlm.models.program import WeightKey
from eventlm.models.weights.find_weights import find_weights
from eventlm.models.weights.matrix_types import gpu_types, matrix_types, packed_types
from eventlm.models.weights.weight_bytes import weight_bytes
from eventlm.sampling_params import SamplingParams
from eventlm.worker.forward import make_cache, make_forward
from eventlm.worker.protocol import NewSequence, WorkerSetup
from eventlm.worker.sequence_table import Row, WorkerSequence
from tests.kernels.cpu.decoders import relative_error
from tests.models.families.proof import SMALL, make_checkpoint, serve
from tests.models.gguf.files import to_gguf
from tests.models.gguf.test_config_json import MIXTURE
from tests.models.gguf.test_hybrid_fields import CASES as HYBRIDS
from tests.models.quantized.checkpoints import CASES, write_quantized

NUM_TOKENS = 40
#: llama.cpp's name of architectures, transformers', and fields of their configs.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2moe": (
        "Qwen2MoeForCausalLM",
        MIXTURE | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96, "mlp_only_layers": []},
    ),
    **{architecture: HYBRIDS[architecture] for architecture in ("qwen35", "qwen3next", "lfm2", "lfm2moe")},
}


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    make_checkpoint(tmp_path / "checkpoint", "LlamaForCausalLM", **{**SMALL, "tie_word_embeddings": request.param})
    return tmp_path / "checkpoint"


def logits_of(folder: Path, **options: str) -> torch.Tensor:
    """Of some tokens, as a worker with these options computes them."""
    setup = WorkerSetup(
        replica=0,
        epoch=1,
        model=str(folder),
        block_size=16,
        num_blocks=8,
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=1,
        threads=1,
        **options,  # type: ignore[arg-type]
    )
    model = read_model(folder)
    forward = make_forward(setup, model, make_cache(setup, model))
    token_ids = list(range(3, 3 + NUM_TOKENS))
    new = NewSequence(request=0, index=0, token_ids=token_ids, num_prompt_tokens=NUM_TOKENS, params=SamplingParams())
    sequence = WorkerSequence(new)
    sequence.block_table.extend(range(8))
    return forward.logits(forward.run([Row(sequence, 0, NUM_TOKENS, samples=False)], None)).float()


def test_four_bits_and_eight_for_what_is_sensitive(folder: Path) -> None:
    model = read_model(folder)
    types = matrix_types(find_weights(folder, model), model, "int4")
    vocabulary = {"embedding"} if model.tie_word_embeddings else {"embedding", "lm_head"}
    assert {key.name for key, kind in types.items() if kind == "Q8_0"} == {*vocabulary, "key", "value"}
    layer = {key.name for key, kind in types.items() if kind == "Q4_1"}
    assert layer == {"query", "output", "gate", "up", "down"}
    assert matrix_types(find_weights(folder, model), model, "int8") == {}
    if available_builds():
        whole, rounded = (weight_bytes(model, "bfloat16", types=each) for each in ({}, types))
        assert 6 / 16 < rounded / whole < 9 / 16


def test_a_rounded_model_is_nearer_than_a_plainly_rounded_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not available_builds():
        pytest.skip("needs a compiler")
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))
    to_gguf(folder, tmp_path / "plain.gguf", "llama", "Q4_1")
    wanted, rounded, in_int8 = (
        logits_of(folder, dtype="bfloat16", quantization=quantization) for quantization in ("none", "int4", "int8")
    )
    plain = logits_of(gguf_folder(tmp_path / "plain.gguf"))
    errors = [relative_error(each, wanted) for each in (in_int8, rounded, plain)]
    assert errors == sorted(errors)
    assert errors[1] < 0.9 * errors[2]


@torch.inference_mode()
@pytest.mark.parametrize("architecture", OTHERS)
def test_experts_and_layers_with_a_state_are_rounded_alike(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the errors of all tokens the median counts: some pass other experts when numbers are rounded."""
    if not available_builds():
        pytest.skip("needs a compiler")
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))
    name, fields = OTHERS[architecture]
    exact = make_checkpoint(tmp_path / "checkpoint", name, **SMALL | fields)
    to_gguf(tmp_path / "checkpoint", tmp_path / "plain.gguf", architecture, "Q4_1")
    prompt = list(range(3, 3 + NUM_TOKENS))
    errors = []
    for folder, quantization in (
        *((tmp_path / "checkpoint", each) for each in ("int8", "int4")),
        (gguf_folder(tmp_path / "plain.gguf"), "none"),
    ):
        with monkeypatch.context() as patch:
            schedule = serve(
                folder, {(0, 0): prompt}, patch, 24, dtype="bfloat16", block_size=16, quantization=quantization
            )
        ids = torch.tensor([prompt + schedule.outputs[0, 0][:-1]])
        wanted, found = exact(ids).logits[0, NUM_TOKENS - 1 :], torch.stack(schedule.logits[0, 0])
        errors.append(median(relative_error(*pair) for pair in zip(found.float(), wanted, strict=True)))
    assert errors == sorted(errors)
    assert errors[0] < 0.12
    assert errors[1] < 0.9 * errors[2]


def test_codes_of_a_file_stay_or_are_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))
    make_checkpoint(tmp_path / "checkpoint", "LlamaForCausalLM", **SMALL)
    to_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", "llama", "Q5_0")
    folder = gguf_folder(tmp_path / "model.gguf")
    model = read_model(folder)
    files = find_weights(folder, model)
    assert matrix_types(files, model, "none") == packed_types(files)
    assert set(packed_types(files).values()) == {"Q5_0"}
    assert matrix_types(files, model, "int4")[WeightKey("down", 0, "weight")] == "Q4_1"
    if available_builds():
        wanted, rounded = (logits_of(folder, quantization=quantization) for quantization in ("none", "int4"))
        assert 0.001 < relative_error(rounded, wanted) < 0.5


def test_what_files_have_as_codes_stays_so_if_nothing_else_was_asked(tmp_path: Path) -> None:
    write_quantized(tmp_path, CASES["gptq, modules with other settings"])
    model = read_model(tmp_path)
    files = find_weights(tmp_path, model)
    assert set(matrix_types(files, model, "none").values()) == {"I4_128", "I8_32"}
    assert matrix_types(files, model, "int8") == {}


def test_gpus_take_products_of_one_type_and_no_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))
    make_checkpoint(tmp_path / "checkpoint", "LlamaForCausalLM", **SMALL)
    to_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", "llama", "Q4_0")
    folder = gguf_folder(tmp_path / "model.gguf")
    model = read_model(folder)
    files = find_weights(folder, model)
    packed = packed_types(files)
    assert WeightKey("embedding", 0, "weight") in packed
    assert gpu_types(files, model) == {key: kind for key, kind in packed.items() if key.name != "embedding"}
    other = [weight._replace(dtype="Q8_0") if weight.key.name == "value" else weight for weight in files[0].weights]
    types = gpu_types([files[0]._replace(weights=other)], model)
    assert {key.name for key in types} == {"output", "gate", "up", "down", "lm_head"}
    other = [weight._replace(dtype="Q5_0") if weight.key.name == "down" else weight for weight in files[0].weights]
    types = gpu_types([files[0]._replace(weights=other)], model)
    assert {key.name for key in types} == {"query", "key", "value", "output", "gate", "up", "lm_head"}
