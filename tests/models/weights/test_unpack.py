"""What quantized matrices hold, and the models that they are parts of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from eventlm.errors import CheckpointError
from eventlm.kernels.cpu import native
from eventlm.kernels.int8_linear import quantize_rows
from eventlm.models.checkpoint.json_files import read_json_object
from eventlm.models.checkpoint.safetensors_header import FileStamp
from eventlm.models.config import model_fingerprint, read_model
from eventlm.models.loader import load_decoder
from eventlm.models.program import WeightKey
from eventlm.models.quantized.method import OLD_FILE
from eventlm.models.quantized.scheme import Scheme
from eventlm.models.weights.find_weights import find_weights
from eventlm.models.weights.matrix_types import packed_types
from eventlm.models.weights.quantized_matrices import QuantizedMatrix, QuantizedPart
from eventlm.models.weights.unpack import UnpackedMatrix
from eventlm.models.weights.weight_bytes import weight_bytes
from eventlm.models.weights.weight_reader import read_pieces
from tests.checkpoints import edit_json
from tests.kernels.cpu.decoders import CompiledDecoder, Piece, TorchDecoder, only, random_sequences, relative_error
from tests.models.families.proof import serve
from tests.models.families.test_qwen_next import DELTA, EXPERTS
from tests.models.quantized.checkpoints import (
    CASES,
    FIELDS,
    fp4_codes,
    fp8,
    write_expert_stacks,
    write_fp8_experts,
    write_gpt_oss,
    write_quantized,
)

#: The codes that a case's matrices are for the compiled decoder. Others become bfloat16.
KINDS = {
    "gptq": {"I4_128"},
    "gptq, zeros": {"I4_32"},
    "gptq, 8 bits, one group": {"I8_128"},
    "gptq, groups in an order": set(),
    "gptq, modules with other settings": {"I4_128", "I8_32"},
    "awq": {"I4_32"},
    "packed": {"I4_32"},
    "packed, zeros": {"I4_32"},
    "packed, 8 bits by channel": {"I8_128"},
    "packed, groups in an order": set(),
    "int8": {"I8_128"},
    "int8, zeros": {"I8_128"},
    "int8 by tensor": {"I8_128"},
    "float8 by channel": {"F8_128"},
    "float8 by block": {"F8_128"},
    "mxfp4": {"MXFP4"},
    "mixed": {"I4_32", "I8_128", "F8_128"},
    "fp8 by block": {"F8_128"},
    "fp8 by tensor": {"F8_128"},
    "fp8 by channel": {"F8_128"},
}


def key_of(module: str) -> WeightKey:
    _, _, layer, _, name = module.split(".")
    names = {"q": "query", "k": "key", "v": "value", "o": "output", "gate": "gate", "up": "up", "down": "down"}
    return WeightKey(names[name.removesuffix("_proj")], int(layer), "weight")


@torch.inference_mode()
@pytest.mark.parametrize("name", CASES)
def test_models_compute_with_the_numbers_of_their_library(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, values = write_quantized(tmp_path, CASES[name])
    spec = read_model(tmp_path)
    files = find_weights(tmp_path, spec)
    found = {}
    for key, first_row, rows in read_pieces(files):
        found.setdefault(key, torch.empty(0))
        found[key] = torch.cat((found[key], rows.float()))
        assert first_row + len(rows) == len(found[key])
    for module, expected in values.items():
        assert torch.equal(found[key_of(module)], expected), module
    [sequence] = random_sequences(FIELDS["vocab_size"], [40])
    expected = model(torch.tensor([sequence])).logits[0]
    exact = TorchDecoder(tmp_path, "float32").run(sequence).logits_TV
    assert float((exact - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    types = packed_types(files)
    assert set(types.values()) == KINDS[name]
    for build in native.available_builds():
        decoder = CompiledDecoder(tmp_path, build)
        logits = only(decoder.run([sequence], [[0, 1, 2]], [[Piece(0, 0, 33)], [Piece(0, 33, 40)]])).logits_TV
        assert relative_error(logits, expected) < 0.03, build
        num_unpacked = len(values.keys()) - len(types)
        said = f"{num_unpacked} of {len(values)} quantized matrices are unpacked to bfloat16: "
        assert (said in capsys.readouterr().err) == (num_unpacked > 0)
        if types:
            held = sum(decoder.decoder.weight_bytes.values())
            embedding = FIELDS["vocab_size"] * FIELDS["hidden_size"] * 2
            planned = weight_bytes(spec, "bfloat16", types=types) - 2 * 128 * 5 - embedding
            # Panels of heads and of the last outputs are filled up.
            assert held <= planned < 1.1 * held


def test_an_old_checkpoint_is_the_same(tmp_path: Path) -> None:
    """It has no `quantization_config`, but another file."""
    for name in ("new", "old"):
        write_quantized(tmp_path / name, CASES["gptq, groups in an order"])
    fields = read_json_object(tmp_path / "old" / "config.json").pop("quantization_config")
    edit_json(tmp_path / "old" / "config.json", quantization_config=None)
    with pytest.raises(CheckpointError, match=r"belongs to quantized weights, and by config\.json no weights are"):
        load_decoder(tmp_path / "old", dtype="float32")
    without = model_fingerprint(tmp_path / "old")
    del fields["quant_method"]
    (tmp_path / "old" / OLD_FILE).write_text(json.dumps(fields))
    assert model_fingerprint(tmp_path / "old") != without
    old, new = (load_decoder(tmp_path / name, dtype="float32").weights for name in ("old", "new"))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[key], new[key]) for key in new)
    assert read_model(tmp_path / "old").dtype == "bfloat16"


#: Heads are shorter than blocks of 128 outputs.
HYBRID: dict[str, Any] = (
    DELTA | EXPERTS | {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "shared_expert_intermediate_size": 96}
)
HYBRID_CASES = {
    "fp8 by block": {"F8_128"},
    "fp8 by channel": {"F8_128"},
    "float8 by block": {"F8_128"},
    "awq": {"I4_32"},
    "gptq, zeros": {"I4_32"},
    "gptq, groups in an order": set(),
    "packed, zeros": {"I4_32"},
    "mxfp4": {"MXFP4"},
}


@pytest.mark.parametrize("case", HYBRID_CASES)
@pytest.mark.parametrize("architecture", ["Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"])
def test_rows_in_turns_are_told_apart(
    architecture: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of queries and gates of each head, and with Qwen3-Next those of each key head."""
    model, _ = write_quantized(tmp_path / "quantized", CASES[case], architecture, **HYBRID)
    model.save_pretrained(tmp_path / "floats")
    found, wanted = (load_decoder(tmp_path / name, dtype="float32").weights for name in ("quantized", "floats"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    types = packed_types(find_weights(tmp_path / "quantized", read_model(tmp_path / "quantized")))
    assert set(types.values()) == HYBRID_CASES[case]
    # This case of AWQ has values as floats, which queries are multiplied with together.
    in_turns = {"mixed", "delta_gate"} | (set() if case == "awq" else {"query", "output_gate"})
    assert not types or in_turns <= {key.name for key in types}
    prompt = list(range(3, 43))
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1]
    for build in native.available_builds():
        with monkeypatch.context() as patch:
            schedule = serve(
                tmp_path / "quantized", {(0, 0): prompt}, patch, 1, dtype="bfloat16", block_size=16, cpu_kernels=build
            )
        # With rows in another order it is 0.5 or more.
        assert relative_error(schedule.logits[0, 0][0].float(), expected) < 0.25, build


@torch.inference_mode()
def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    model = write_gpt_oss(tmp_path)
    [sequence] = random_sequences(FIELDS["vocab_size"], [40])
    expected = model(torch.tensor([sequence])).logits[0]
    found = TorchDecoder(tmp_path, "float32").run(sequence).logits_TV
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    types = packed_types(find_weights(tmp_path, read_model(tmp_path)))
    assert {key.name for key in types} == {"gate", "up", "down"}
    assert len(types) == 2 * 3 * 3
    assert set(types.values()) == {"MXFP4"}
    whole = load_decoder(tmp_path, dtype="float32").weights
    blocks = read_pieces(find_weights(tmp_path, read_model(tmp_path)), in_blocks=types)
    for key, _, rows in blocks:
        if key in types:
            numbers = torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType.MXFP4))
            fused = whole[key._replace(name="down" if key.name == "down" else "gate_up")]
            start = 96 if key.name == "up" else 0
            assert torch.equal(numbers, fused[start : start + len(numbers)]), key


@torch.inference_mode()
@pytest.mark.parametrize("is_stacked", [False, True])
def test_experts_in_fp8(is_stacked: bool, tmp_path: Path) -> None:
    model = write_fp8_experts(tmp_path, is_stacked=is_stacked)
    [sequence] = random_sequences(FIELDS["vocab_size"], [40])
    expected = model(torch.tensor([sequence])).logits[0]
    found = TorchDecoder(tmp_path, "float32").run(sequence).logits_TV
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    types = packed_types(find_weights(tmp_path, read_model(tmp_path)))
    assert len(types) == 2 * 3 * 3
    assert set(types.values()) == {"F8_128"}
    for build in native.available_builds():
        decoder = CompiledDecoder(tmp_path, build)
        logits = only(decoder.run([sequence], [[0, 1, 2]], [[Piece(0, 0, 33)], [Piece(0, 33, 40)]])).logits_TV
        assert relative_error(logits, expected) < 0.1, build


@pytest.mark.parametrize("case", ["int8", "int8 by tensor", "float8 by channel", "float8 by block", "fp8 by channel"])
def test_experts_in_one_tensor_of_bytes(case: str, tmp_path: Path) -> None:
    values = write_expert_stacks(tmp_path, CASES[case])
    weights = load_decoder(tmp_path, dtype="float32").weights
    for layer in range(2):
        for name, end in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
            for expert, expected in enumerate(values[f"model.layers.{layer}.mlp.experts.{end}"]):
                assert torch.equal(weights[WeightKey(name, layer, "weight", expert)], expected), (layer, name, expert)


def test_quantized_matrices_are_rounded_anew_if_asked(tmp_path: Path) -> None:
    _, values = write_quantized(tmp_path, CASES["awq"])
    decoder = load_decoder(tmp_path, quantization="int8")
    for module in ("model.layers.1.self_attn.o_proj", "model.layers.0.mlp.down_proj"):
        key = key_of(module)
        integers, scales = quantize_rows(values[module])
        assert torch.equal(decoder.weights[key], integers)
        assert torch.equal(decoder.scales[key], scales)
    for build in native.available_builds():
        held = CompiledDecoder(tmp_path, build, quantization="int8").decoder.weight_bytes["down_proj"]
        assert held == 2 * 128 * 320


def test_the_formulas_are_those_of_transformers() -> None:
    """What `checkpoints` says that floats of 8 and 4 bits hold."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(2)
    weight = rng.standard_normal((256, 384)) * 0.1
    for block, dtype in (((128, 128), torch.float32), ((1, 0), torch.float32), ((0, 0), torch.float32)):
        parts, values = fp8(block, scale="scale", dtype=dtype)(weight, rng)
        assert torch.equal(Fp8Dequantize(None)._dequantize_one(parts["weight"], parts["scale"], dtype), values), block
    pairs, powers, values = fp4_codes(weight[None])
    blocks = torch.from_numpy(pairs).unflatten(-1, (-1, 16))
    found = convert_moe_packed_tensors(blocks, torch.from_numpy(powers))
    assert torch.equal(found.transpose(1, 2).float(), values)


def test_a_float_that_is_no_number_spoils_its_block() -> None:
    codes, scales = torch.ones(3, 256, dtype=torch.uint8), torch.full((1, 2), 0.5)
    codes[0, 3], codes[1, 200] = 127, 255
    data = {"weight": codes.flatten(), "weight_scale": scales.view(torch.uint8).flatten()}
    stamp = FileStamp(0, 0, 0, 0)
    parts = {
        "weight": QuantizedPart(Path("x"), stamp, "", "F8_E4M3", (3, 256), 0, 768),
        "weight_scale": QuantizedPart(Path("x"), stamp, "", "F32", (1, 2), 0, 8),
    }
    scheme = Scheme(layout="fp8", group=(128, 128), is_exact=True)
    matrix = UnpackedMatrix(QuantizedMatrix({}, 3, 256, scheme, parts), data)
    blocks = matrix.blocks("F8_128", range(3)).view(3, 2, 132)
    held = blocks[..., :4].contiguous().view(torch.float32)[..., 0]
    assert held.isnan().tolist() == [[True, False], [False, True], [False, False]]
    assert held[2].tolist() == [128, 128]
    assert matrix.values(range(2)).isnan().nonzero().tolist() == [[0, 3], [1, 200]]
