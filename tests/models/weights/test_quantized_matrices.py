"""Quantized checkpoints that are broken: what is wrong is said before there is memory for weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eventlm.errors import CheckpointError
from eventlm.models import loader
from eventlm.models.loader import load_decoder
from tests.checkpoints import edit_json
from tests.models.families.proof import make_checkpoint
from tests.models.quantized.checkpoints import (
    CASES,
    FIELDS,
    Tensors,
    write_fp8_experts,
    write_gpt_oss,
    write_quantized,
)

UP = "model.layers.1.mlp.up_proj"
EXPERTS = "model.layers.1.mlp.experts.down_proj"
SCALES = f"{EXPERTS}_scale_inv"
Change = Callable[[Tensors], None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a case; not to be changed."""
    root = tmp_path_factory.mktemp("quantized")

    def folder(case: str) -> Path:
        if not (root / case).exists():
            write_quantized(root / case, CASES[case])
        return root / case

    return folder


def drop(part: str) -> Change:
    return lambda tensors: tensors.pop(f"{UP}.{part}", None)


def put(part: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({f"{UP}.{part}": tensor}) if f"{UP}.{part}" in tensors else None


def change(part: str, do: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: put(part, do(tensors[f"{UP}.{part}"]))(tensors) if f"{UP}.{part}" in tensors else None


def with_value(value: float, *, at: int = 5) -> Callable[[Tensor], Tensor]:
    def put_value(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[at] = value
        return tensor

    return put_value


@pytest.mark.parametrize(
    ("case", "edit", "message"),
    [
        ("gptq", drop("scales"), f"scales of {UP} is missing; download the model again"),
        ("gptq", drop("qweight"), f"qweight of {UP} is missing"),
        ("gptq, groups in an order", drop("g_idx"), f"g_idx of {UP} is missing"),
        ("gptq", put("scales", torch.ones(2, 320).half()),
         f"{UP}.scales has shape [2, 320], by config.json it is [1, 320] (scales are of 1 output and 128 inputs)"),
        ("gptq", change("qweight", lambda t: t[:-1]), "qweight has shape [15, 320], by config.json it is [16, 320]"),
        ("gptq", change("qzeros", lambda t: t.long()), "qzeros has dtype I64, in this format it is I32; download"),
        ("gptq", change("scales", with_value(torch.nan)), f"tensor {UP}.scales has NaN or infinity; download"),
        ("gptq", change("scales", with_value(torch.inf)), f"tensor {UP}.scales has NaN or infinity"),
        ("gptq", change("g_idx", with_value(1)), f"{UP}.g_idx has numbers from 0 to 1, and there are 1 groups"),
        ("gptq, zeros", change("g_idx", with_value(3)), f"{UP}.g_idx has groups in another order than config.json"),
        ("gptq, groups in an order", change("g_idx", with_value(-1)), "g_idx has numbers from -1 to 1, and there"),
        ("gptq, zeros", change("qzeros", with_value(0xF << 8)), f"{UP}.qzeros has a zero of 16, which 4 bits do not"),
        ("gptq", change("bias", with_value(0.5)), f"{UP}.bias is not zero, and by config.json there is no bias"),
        ("awq", drop("qzeros"), f"qzeros of {UP} is missing"),
        ("awq", change("scales", with_value(-torch.inf)), f"tensor {UP}.scales has NaN or infinity"),
        ("packed", drop("weight_shape"), f"weight_shape of {UP} is missing"),
        ("packed", change("weight_scale", with_value(torch.nan)), f"tensor {UP}.weight_scale has NaN or infinity"),
        ("packed, groups in an order", change("weight_g_idx", with_value(2)), "has numbers from 0 to 2, and there are"),
        ("gptq, 8 bits, one group", put("scales", torch.ones(320).half()), "has shape [320], by config.json it is [1,"),
        ("packed", put("weight_shape", torch.tensor([128, 320])), "shape is [128, 320], by config.json it is [3"),
        ("packed, zeros", drop("weight_zero_point"), f"weight_zero_point of {UP} is missing"),
        ("int8", put("weight", torch.zeros(320, 128).byte()), f"{UP}.weight has dtype U8, in this format it is I8"),
        ("int8", drop("weight_scale"), f"weight_scale of {UP} is missing"),
        ("int8", drop("weight"), f"weight of {UP} is missing"),
        ("fp8 by block", change("weight_scale_inv", lambda t: t[:1]),
         "weight_scale_inv has shape [1, 1], by config.json it is [3, 1] (scales are of 128 outputs and 128 inputs)"),
        ("fp8 by block", change("weight_scale_inv", with_value(-torch.inf, at=0)), "scale_inv has NaN or infinity"),
        ("mxfp4", change("weight_scale", with_value(255)), f"{UP}.weight_scale has NaN or infinity"),
        ("gptq", lambda tensors: tensors.update({f"{UP}.weight": torch.zeros(320, 128)}), "weight is in two files"),
        ("awq", lambda tensors: tensors.update({"model.layers.1.self_attn.v_proj.qweight": torch.zeros(1).int()}),
         "v_proj.qweight belongs to quantized weights, and by config.json (awq) its module has none; take"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    folders: Callable[[str], Path],
    case: str,
    edit: Change,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(folders(case), tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("*.safetensors"):
        tensors = load_file(path)
        edit(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    monkeypatch.setattr(loader, "Decoder", None)
    with pytest.raises(CheckpointError) as caught:
        load_decoder(tmp_path, dtype="float32")
    assert str(caught.value).startswith(f"{tmp_path}/model-")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("case", "config", "message"),
    [
        (
            "gptq",
            None,
            "g_idx belongs to quantized weights, and by config.json no weights are quantized; take the model in",
        ),
        (
            "gptq",
            CASES["awq"].config,
            "g_idx belongs to quantized weights, and by config.json (awq) its module has none",
        ),
        (
            "packed",
            CASES["int8"].config,
            " belongs to quantized weights, and by config.json (compressed-tensors) its",
        ),
        ("fp8 by block", None, "weight has dtype F8_E4M3, as quantized weights have"),
        ("gptq", CASES["gptq, zeros"].config, "has shape [3, 16], by config.json it is [10, 16]"),
    ],
)
def test_configs_of_other_checkpoints(
    folders: Callable[[str], Path], case: str, config: dict[str, object] | None, message: str, tmp_path: Path
) -> None:
    shutil.copytree(folders(case), tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", quantization_config=config)
    with pytest.raises(CheckpointError) as caught:
        load_decoder(tmp_path, dtype="float32")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda tensors: tensors.pop(f"{EXPERTS}_scales", None),
            "weight_scale of model.layers.1.mlp.experts.down_proj",
        ),
        (
            lambda tensors: tensors.update(
                {name: tensor[:2].contiguous() for name, tensor in tensors.items() if name == f"{EXPERTS}_blocks"}
            ),
            "experts.down_proj_blocks has shape [2, 64, 3, 16], by config.json it is [3, 64, 3, 16]",
        ),
    ],
)
def test_experts_in_one_tensor(edit: Change, message: str, tmp_path: Path) -> None:
    write_gpt_oss(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        tensors = load_file(path)
        if f"{EXPERTS}_blocks" in tensors or f"{EXPERTS}_scales" in tensors:
            edit(tensors)
        save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        load_decoder(tmp_path, dtype="float32")
    assert message in str(caught.value)


def packed_stack(name: str, stack: Tensor) -> Tensors:
    """The parts of a module that has all experts of a layer."""
    words = torch.zeros(*stack.shape[:2], stack.shape[2] // 8, dtype=torch.int32)
    scales = torch.ones(*stack.shape[:2], stack.shape[2] // 64)
    return {
        f"{name}.weight_packed": words,
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": torch.tensor(stack.shape),
    }


def old_packed_stack(name: str, stack: Tensor) -> Tensors:
    """As llm-compressor 0.12 wrote them."""
    parts = packed_stack(name, stack)
    return {part.replace(".weight_", "_"): tensor for part, tensor in parts.items()}


def gptq_stack(name: str, stack: Tensor) -> Tensors:
    return {f"{name}.qweight": torch.zeros(len(stack), stack.shape[2] // 8, stack.shape[1], dtype=torch.int32)}


def float8_stack(name: str, stack: Tensor) -> Tensors:
    return {name: stack.to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(*stack.shape[:2], 1)}


@pytest.mark.parametrize(
    ("case", "stack", "found"),
    [
        ("packed", packed_stack, ("down_proj.weight_packed", "I32", [3, 128, 16])),
        ("packed", old_packed_stack, ("down_proj_scale", "F32", [3, 128, 2])),
        ("gptq", gptq_stack, ("down_proj.qweight", "I32", [3, 16, 128])),
        ("float8 by channel", float8_stack, ("down_proj_scale", "F32", [3, 128, 1])),
        ("fp8 by channel", float8_stack, ("down_proj_scale", "F32", [3, 128, 1])),
    ],
)
def test_experts_in_one_tensor_of_an_unsupported_layout(
    case: str, stack: Callable[[str, Tensor], Tensors], found: tuple[str, str, list[int]], tmp_path: Path
) -> None:
    fields = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    model = make_checkpoint(tmp_path, "Qwen3MoeForCausalLM", **FIELDS | fields)
    model.save_pretrained(tmp_path, save_original_format=False)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if ".experts." in name]:
        tensors |= stack(name, tensors.pop(name))
    save_file(tensors, path)
    edit_json(tmp_path / "config.json", quantization_config=CASES[case].config)
    with pytest.raises(CheckpointError) as caught:
        load_decoder(tmp_path, dtype="float32")
    end, dtype, shape = found
    assert str(caught.value) == (
        f"{path}: tensor model.layers.0.mlp.experts.{end} ({dtype}, shape {shape}) belongs to the quantized experts of "
        "a layer in one tensor, in a layout that is not supported; use a checkpoint with separate tensors for each "
        "expert"
    )


def test_codes_of_interleaved_experts(tmp_path: Path) -> None:
    """Of gpt-oss, [in, out] or [out, in] cannot be told where a matrix is a square."""
    write_gpt_oss(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config=CASES["int8"].config)
    path = tmp_path / "model-2.safetensors"
    codes = {f"{EXPERTS}.weight": torch.zeros(3, 64, 96, dtype=torch.int8)}
    save_file(load_file(path) | codes, path)
    with pytest.raises(CheckpointError, match=r"experts\.down_proj\.weight \(I8, shape \[3, 64, 96\]\) belongs to the"):
        load_decoder(tmp_path, dtype="float32")


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.experts.gate_up_proj_bias_scales", "model.layers.1.self_attn.sinks_scales"]
)
def test_vectors_are_no_matrices(name: str, tmp_path: Path) -> None:
    write_gpt_oss(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "mxfp4"})
    path = tmp_path / "model-2.safetensors"
    save_file(load_file(path) | {name: torch.zeros(1, dtype=torch.uint8)}, path)
    with pytest.raises(CheckpointError, match=f"tensor {name} belongs to no matrix of the model that config.json"):
        load_decoder(tmp_path, dtype="float32")


def test_an_expert_is_missing(tmp_path: Path) -> None:
    write_fp8_experts(tmp_path, is_stacked=False)
    for path in tmp_path.glob("*.safetensors"):
        save_file({name: tensor for name, tensor in load_file(path).items() if ".experts.1.up_proj." not in name}, path)
    with pytest.raises(CheckpointError) as caught:
        load_decoder(tmp_path, dtype="float32")
    assert str(caught.value).endswith(
        "tensor model.layers.0.mlp.experts.1.up_proj.weight is missing (2 are); download the model again"
    )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(SCALES), f"weight_scale of {EXPERTS} is missing; download the model again"),
        (
            lambda tensors: tensors.update({SCALES: tensors[SCALES][:, :, :0]}),
            f"{SCALES} has shape [3, 1, 0], by config.json it is [3, 1, 1] (scales are of 128 outputs and 128 inputs)",
        ),
        (lambda tensors: tensors.update({SCALES: tensors[SCALES] / 0}), f"tensor {SCALES} has NaN or infinity"),
    ],
)
def test_experts_in_one_tensor_of_fp8(edit: Change, message: str, tmp_path: Path) -> None:
    write_fp8_experts(tmp_path, is_stacked=True)
    for path in tmp_path.glob("*.safetensors"):
        tensors = load_file(path)
        if SCALES in tensors:
            edit(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    with pytest.raises(CheckpointError) as caught:
        load_decoder(tmp_path, dtype="float32")
    assert message in str(caught.value)
