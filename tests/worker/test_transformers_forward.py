"""Models that transformers computes, over our cache: logits and tokens are transformers' own.

Of every decoder that it makes: `tests/models/decoders.py`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eventlm.errors import CheckpointError
from eventlm.kernels.cpu import native
from eventlm.worker import transformers_forward
from eventlm.worker.compiled_norm import CompiledNorm
from eventlm.worker.packed_linear import PackedLinear
from eventlm.worker.protocol import transformers_backend
from eventlm.worker.transformers_forward import load_model
from tests.checkpoints import make_checkpoint
from tests.models.decoders import compare, write_checkpoint
from tests.models.families.proof import VOCAB_SIZE, errors, serve
from tests.worker.launches import launched, new_sequence, payload
from tests.worker.reference import make_runner

#: Latent attention behind experts, layers of two shapes with windows and sinks, learned positions, and one whose keys
#: and values go through the cache twice in each layer.
CASES = ("deepseek_v2", "mimo_v2_flash", "opt", "diffllama")


@pytest.mark.parametrize("model_type", CASES)
def test_it_computes_what_transformers_computes(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = write_checkpoint(tmp_path, model_type)
    schedule = compare(tmp_path, exact, monkeypatch, num_tokens=24)
    host = schedule.runner.host_info()
    assert host["attention_backend"] == transformers_backend("")
    assert host["transformers"]


@pytest.mark.skipif(not native.available_builds(), reason="no build of the forward pass is compiled")
@pytest.mark.parametrize(
    ("model_type", "fields", "num_norms", "num_rotaries", "num_inputs"),
    [
        # Query, key and value have biases, and the logits keep their cap.
        ("gemma2", {"attention_bias": True, "final_logit_softcapping": 3.0}, 17, 1, 17),
        # Two shapes of heads, values that are smaller than keys, windows and sinks.
        ("mimo_v2_flash", {}, 9, 1, 11),
        ("deepseek_v2", {"qk_rope_head_dim": 16}, 17, 0, 29),
    ],
)
def test_rounding_with_compiled_operations(
    model_type: str,
    fields: dict[str, Any],
    num_norms: int,
    num_rotaries: int,
    num_inputs: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No more of it than transformers' own."""
    exact = write_checkpoint(tmp_path, model_type, **fields)
    rounded = type(exact).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    rng = random.Random(3)
    prompts = {(number, 0): [rng.randrange(3, VOCAB_SIZE) for _ in range(40)] for number in range(2)}
    options: dict[str, Any] = {"dtype": "bfloat16", "block_size": 16, "model_impl": "transformers"}
    schedule = serve(tmp_path, prompts, monkeypatch, 24, **options)
    build = native.available_builds()[0]
    assert schedule.runner.host_info()["attention_backend"] == transformers_backend(build)
    forward: Any = schedule.runner._forward
    assert forward._compiled is not None
    parts = list(forward._model.modules())
    assert sum(isinstance(part, CompiledNorm) for part in parts) == num_norms
    assert len(forward._rotary._functions) == num_rotaries
    # Layers with the same input are multiplied by together.
    linears = [part for part in parts if isinstance(part, PackedLinear)]
    assert len({id(part._shared) for part in linears}) == num_inputs < len(linears)
    error, rounded_error = errors(exact, rounded, prompts, schedule, is_median=model_type != "gemma2")
    assert 0 < error <= 1.1 * rounded_error
    if cap := fields.get("final_logit_softcapping"):
        assert float(torch.cat([torch.stack(logits) for logits in schedule.logits.values()]).abs().max()) <= cap


@pytest.mark.skipif(not native.available_builds(), reason="no build of the forward pass is compiled")
def test_what_the_compiled_attention_cannot_run_is_torch_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runner: Any = make_runner(make_checkpoint(tmp_path), dtype="bfloat16", model_impl="transformers")
    assert runner._forward._compiled is None
    build = native.available_builds()[0]
    assert runner.host_info()["attention_backend"] == transformers_backend(build, attends=False)
    assert "the compiled attention is not used" in (said := capsys.readouterr().err)
    assert "blocks of 4 tokens are not a multiple of 16" in said


@pytest.mark.skipif(not native.available_builds(), reason="no build of the forward pass is compiled")
@pytest.mark.parametrize(
    ("model_type", "block_size", "num_threads"),
    [("gemma2", 16, 1), ("opt", 16, 1), ("gemma2", 4, 3), ("mixtral", 16, 3), ("gpt2", 16, 3)],
)
def test_torch_has_threads_for_what_is_not_compiled(
    model_type: str, block_size: int, num_threads: int, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, model_type)
    before = torch.get_num_threads()
    try:
        make_runner(tmp_path, dtype="bfloat16", block_size=block_size, threads=3, model_impl="transformers")
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_mixes_sequences_is_refused(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_mixing(*options: Any) -> Any:
        model = load_model(*options)
        # What a convolution over the row does.
        model.model.layers[1].mlp.register_forward_hook(lambda _, __, output: output + 0.2 * output.roll(1, dims=1))
        return model

    folder = make_checkpoint(tmp_path, dtype=dtype)
    make_runner(folder, dtype=dtype, model_impl="transformers")
    monkeypatch.setattr(transformers_forward, "load_model", load_mixing)
    with pytest.raises(CheckpointError, match=r"depends on the other sequences of the step, by something that is not"):
        make_runner(folder, dtype=dtype, model_impl="transformers")


def test_embeddings_and_logprobs_are_those_of_our_own_pass(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, dtype="float32")
    outputs = []
    for impl in ("eventlm", "transformers"):
        runner = make_runner(folder, model_impl=impl)
        scored = new_sequence(1, list(range(5, 14)), kind="score")
        pooled = new_sequence(2, list(range(30, 37)), kind="pool")
        chunks = [(1, 0, 0, 9, 0), (2, 0, 0, 7, 0)]
        launch = launched(0, chunks=chunks, blocks=[(0, 0, [0, 1, 2]), (1, 0, [3, 4])])
        outputs.append(runner.execute(launch, payload(scored, pooled)).extras)
    ours, theirs = outputs
    assert [each.row for each in ours] == [each.row for each in theirs] == [0, 1]
    assert ours[0].prompt_logprobs is not None
    assert theirs[0].prompt_logprobs is not None
    assert theirs[0].prompt_logprobs.logprobs == pytest.approx(ours[0].prompt_logprobs.logprobs, abs=1e-4)
    vectors = [torch.frombuffer(bytearray(each[1].embedding), dtype=torch.float32) for each in outputs]
    assert torch.allclose(*vectors, atol=1e-4)


def test_weights_that_are_not_the_model_s_are_told(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.down_proj.weight"
    changes: list[tuple[torch.Tensor | None, str]] = [
        (None, "is missing; download the model again"),
        (
            tensors[name][:, 1:].contiguous(),
            "has shape [64, 159], by config.json it is [64, 160]; the two are not of one model",
        ),
    ]
    for changed, message in changes:
        save_file({**tensors, name: changed} if changed is not None else _without(tensors, name), path)
        with pytest.raises(CheckpointError) as caught:
            make_runner(folder, model_impl="transformers")
        assert str(caught.value) == f"{folder}: tensor {name} {message}"


def _without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: values for key, values in tensors.items() if key != name}
