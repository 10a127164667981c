"""What a value of --cpu-kernels means."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from eventlm.errors import UsageError
from eventlm.kernels.cpu import native
from eventlm.kernels.cpu.native import unsupported
from eventlm.models.cpu_kernels import choose_build, choose_forward, native_model
from eventlm.models.spec import (
    AttentionSpec,
    DeltaSpec,
    FeedForwardSpec,
    LayerInputsSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
)
from tests.models.test_decoder import MODEL


def test_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available_builds", lambda: ["avx2", "baseline"])
    assert choose_build("auto") == "avx2"
    assert choose_build("baseline") == "baseline"
    assert choose_build("torch") == ""
    monkeypatch.setattr(native, "available_builds", list)
    assert choose_build("auto") == choose_build("torch") == ""


def test_what_the_processor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "processor_flags", lambda: native.BUILDS["avx2"])
    with pytest.raises(UsageError, match=r"--cpu-kernels amx: not on this machine, its processor lacks"):
        choose_build("amx")


def test_what_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_library", lambda build: None)
    with pytest.raises(UsageError) as caught:
        choose_build("baseline")
    assert str(caught.value) == (
        "--cpu-kernels baseline: not on this machine, they are not compiled, or of another version; install eventlm "
        "again, where there is a C++ compiler; available: auto, torch"
    )


def test_what_torch_s_operations_cannot_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available_builds", lambda: ["avx2", "baseline"])

    def error_of(wanted: str, model: ModelSpec) -> str:
        with pytest.raises(UsageError) as caught:
            choose_forward(wanted, model, model="m", dtype="bfloat16", block_size=16, quantization="int4")
        return str(caught.value)

    assert error_of("torch", MODEL) == (
        "--quantization int4 needs the compiled forward pass, which --cpu-kernels torch leaves out; take int8 or leave "
        "it out"
    )
    assert error_of("auto", MODEL) == (
        "--quantization int4 needs the compiled forward pass, which cannot run m: heads of 8 are not a multiple of 16 "
        "up to 512; take int8 or leave it out"
    )


def test_nothing_heavy_is_imported() -> None:
    """The control plane asks."""
    program = "import sys, eventlm.models.cpu_kernels; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"num_taps": 9}, "a convolution over 9 tokens is longer than 8"),
        ({"value_dim": 40}, "keys of 16 and values of 40 do not fit into vectors"),
        ({"key_dim": 20}, "336 channels of a convolution are not a multiple of 32"),
    ],
)
def test_states_of_odd_shapes_are_not_compiled(change: dict[str, int], reason: str) -> None:
    assert _reason(**change) == reason


def test_heads_of_hybrids_fill_lines() -> None:
    assert _reason(num_heads=3) == "48 elements of all heads are not a multiple of 32"


def test_heads_of_layers_that_differ_fill_lines() -> None:
    model = _model(layers=tuple(_layer(num_heads=num_heads) for num_heads in (3, 3)))
    assert unsupported(native_model(model), 16) == ""
    model = _model(layers=tuple(_layer(num_heads=num_heads) for num_heads in (3, 4)))
    assert unsupported(native_model(model), 16) == "48 elements of all heads are not a multiple of 32"


@pytest.mark.parametrize(("size", "is_supported"), [(32, True), (48, False), (512, True), (544, False)])
def test_inputs_of_layers_fill_panels(size: int, *, is_supported: bool) -> None:
    inputs = LayerInputsSpec(size=size, vocab_size=80, activation="silu")
    model = _model(layers=(_layer(),), layer_inputs=inputs)
    reason = f"{size} inputs of a layer are not a multiple of 32 up to 512"
    assert unsupported(native_model(model), 16) == ("" if is_supported else reason)


def _reason(num_heads: int = 4, **sizes: int) -> str:
    sizes = {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 16, "value_dim": 64, "num_taps": 4} | sizes
    recurrent = LayerSpec(recurrent=DeltaSpec(**sizes), feed_forward=FeedForwardSpec(size=96))
    return unsupported(native_model(_model(layers=(_layer(num_heads), recurrent))), 16)


def _layer(num_heads: int = 4) -> LayerSpec:
    attention = AttentionSpec(
        num_heads=num_heads, num_kv_heads=1, head_dim=16, rope=RopeSpec(rotary_dim=16), scale=0.25
    )
    return LayerSpec(attention=attention, feed_forward=FeedForwardSpec(size=96))


def _model(**fields: Any) -> ModelSpec:
    return ModelSpec(
        architecture="",
        vocab_size=80,
        hidden_size=64,
        norm=NormSpec(eps=1e-5),
        max_position_embeddings=256,
        tie_word_embeddings=False,
        dtype="bfloat16",
        **fields,
    )
