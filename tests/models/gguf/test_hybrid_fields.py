"""GGUF files of models whose layers keep a state: what their metadata say, and what the converter did to them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eventlm.errors import CheckpointError
from eventlm.kernels.cpu import native
from eventlm.models.config import model_of, read_model
from eventlm.models.fetch.gguf_folder import gguf_folder
from eventlm.models.loader import load_decoder
from eventlm.models.weights.find_weights import find_weights
from eventlm.models.weights.matrix_types import packed_types
from tests.kernels.cpu.decoders import relative_error
from tests.models.families.proof import LENGTHS, SMALL, VOCAB_SIZE, check_tokens, make_checkpoint, serve
from tests.models.gguf.files import to_gguf
from tests.models.gguf.test_config_json import LFM2, MIXTURE, STATES
from tests.models.gguf.test_expert_fields import config_of
from tests.models.weights.test_gguf_weights import change_tensors
from tests.worker.reference import Key

#: Two value heads for each key head.
DELTA = STATES | {"linear_num_value_heads": 4}
#: Not 64 rows, which other matrices have: a mix-up of tensors is then an error of shapes.
SHARED = MIXTURE | {"shared_expert_intermediate_size": 96}
#: llama.cpp's name of the architecture, transformers', and fields of its config.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen35": ("Qwen3_5ForCausalLM", DELTA | {"mtp_num_hidden_layers": 1}),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", DELTA | SHARED | {"moe_intermediate_size": 64}),
    "qwen3next": ("Qwen3NextForCausalLM", DELTA | SHARED | {"moe_intermediate_size": 64}),
    "lfm2": ("Lfm2ForCausalLM", LFM2 | {"block_auto_adjust_ff_dim": False}),
    "lfm2moe": ("Lfm2MoeForCausalLM", LFM2 | MIXTURE | {"moe_intermediate_size": 64, "num_dense_layers": 1}),
}
#: Those that transformers reads from GGUF files itself.
READ_BY_TRANSFORMERS = ("qwen35", "qwen35moe", "lfm2")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENTLM_HOME", str(tmp_path / "home"))


def make(folder: Path, architecture: str, kind: str = "F32", **options: Any) -> Any:
    """A GGUF file beside the checkpoint that it was made of. Returns transformers' model."""
    name, fields = CASES[architecture]
    model = make_checkpoint(folder / "checkpoint", name, **SMALL | fields)
    to_gguf(folder / "checkpoint", folder / "model.gguf", architecture, kind, **options)
    return model


def prompts() -> dict[Key, list[int]]:
    rng = random.Random(3)
    return {(number, 0): [rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for number, length in enumerate(LENGTHS)}


@pytest.mark.parametrize("architecture", CASES)
def test_it_computes_what_the_checkpoint_computes(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = make(tmp_path, architecture)
    folder = gguf_folder(tmp_path / "model.gguf")
    with monkeypatch.context() as patch:
        schedule = serve(folder, prompts(), patch, 4, dtype="float32")
    check_tokens(exact, prompts(), schedule)


@torch.inference_mode()
@pytest.mark.parametrize("architecture", READ_BY_TRANSFORMERS)
def test_files_are_made_as_transformers_reads_them(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    exact = make(tmp_path, architecture)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    ids = torch.tensor([prompts()[2, 0]])
    assert torch.equal(read(ids).logits, exact(ids).logits)


@torch.inference_mode()
@pytest.mark.parametrize("architecture", CASES)
def test_matrices_stay_codes(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those that are exact: they are multiplied as they lie in the file, whatever the order of heads."""
    make(tmp_path, architecture, "Q8_0")
    folder = gguf_folder(tmp_path / "model.gguf")
    types = packed_types(find_weights(folder, read_model(folder)))
    assert set(types.values()) == {"Q8_0"}
    expected = {"embedding", "lm_head", "query", "key", "value", "output", "mixed", "gate", "up", "down"}
    own = {"output_gate", "delta_gate"} if architecture.startswith("qwen") else set()
    assert {key.name for key in types} | {"lm_head"} == expected | own
    schedules = []
    for options in ({"dtype": "float32"}, *({"cpu_kernels": build} for build in native.available_builds())):
        with monkeypatch.context() as patch:
            schedules.append(serve(folder, prompts(), patch, 1, **{"dtype": "bfloat16", "block_size": 16} | options))
    wanted, *found = (torch.stack([logits[0].float() for logits in one.logits.values()]) for one in schedules)
    for logits in found:
        # Heads in another order give errors of 1 and more.
        assert relative_error(logits, wanted) < 0.35


def test_gates_in_one_matrix_with_queries_keys_and_values(tmp_path: Path) -> None:
    """As the first files of Qwen3-Next have them."""
    make(tmp_path, "qwen3next")
    to_gguf(tmp_path / "checkpoint", tmp_path / "fused.gguf", "qwen3next", is_fused=True)
    apart, fused = (load_decoder(gguf_folder(tmp_path / f"{name}.gguf")).weights for name in ("model", "fused"))
    assert apart.keys() == fused.keys()
    assert all(torch.equal(fused[key], weight) for key, weight in apart.items())


def test_layers_that_draft_tokens_stay_in_the_file(tmp_path: Path) -> None:
    make(tmp_path, "qwen35")
    folder = gguf_folder(tmp_path / "model.gguf")
    model = read_model(folder)
    assert model.num_layers == 3
    [file] = find_weights(folder, model)
    assert not any(weight.name.startswith("blk.3.") for weight in file.weights)


def test_decays_that_are_none_are_told(tmp_path: Path) -> None:
    make(tmp_path, "qwen35")
    path = tmp_path / "changed.gguf"
    change_tensors(
        tmp_path / "model.gguf", path, lambda tensors: tensors.update({"blk.0.ssm_a": np.ones(4, np.float32)}), "qwen35"
    )
    with pytest.raises(CheckpointError) as caught:
        load_decoder(gguf_folder(path), dtype="float32")
    assert str(caught.value) == (f"{path}: tensor blk.0.ssm_a has numbers that are not negative; download it again")


QWEN: dict[str, Any] = {
    "expert_count": None,
    "expert_used_count": None,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 128,
}
LFM: dict[str, Any] = {
    "expert_count": None,
    "expert_used_count": None,
    "attention.head_count_kv": [0, 2],
    "shortconv.l_cache": 3,
}


def test_which_layers_keep_a_state(tmp_path: Path) -> None:
    def kinds(architecture: str, changes: dict[str, Any]) -> list[str]:
        found: list[str] = config_of(tmp_path, changes, architecture=architecture)["layer_types"]
        return found

    state, attention = "linear_attention", "full_attention"
    assert kinds("qwen35", QWEN | {"block_count": 4}) == [state, state, state, attention]
    assert kinds("qwen35", QWEN | {"full_attention_interval": 2}) == [state, attention]
    assert kinds("qwen35", QWEN | {"attention.recurrent_layers": [False, True]}) == [attention, state]
    assert kinds("qwen35", QWEN | {"block_count": 3, "nextn_predict_layers": 1, "full_attention_interval": 2}) == [
        state,
        attention,
    ]
    assert kinds("lfm2", LFM) == ["conv", attention]


def test_value_heads_are_in_turns_where_key_heads_serve_several(tmp_path: Path) -> None:
    def is_interleaved(architecture: str, changes: dict[str, Any]) -> bool:
        config = config_of(tmp_path, QWEN | {"full_attention_interval": 2} | changes, architecture=architecture)
        return model_of(config, tmp_path).layers[0].recurrent.is_interleaved  # type: ignore[union-attr, no-any-return]

    mixture = {"expert_count": 6, "expert_used_count": 2}
    assert is_interleaved("qwen35", {})
    assert is_interleaved("qwen35moe", mixture)
    assert not is_interleaved("qwen3next", mixture)
    assert not is_interleaved("qwen35", {"ssm.group_count": 4})


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("qwen35", {"ssm.state_size": None}, "key qwen35.ssm.state_size is missing"),
        ("qwen35", {"ssm.group_count": 0}, "key qwen35.ssm.group_count is 0, it must be a positive integer"),
        ("qwen35", {"ssm.inner_size": 130}, "key qwen35.ssm.inner_size is 130, no multiple of 4 heads"),
        ("qwen35", {"ssm.group_count": 3}, "linear_num_value_heads 4 is not a multiple of linear_num_key_heads 3"),
        ("qwen35", {"full_attention_interval": 0}, "key qwen35.full_attention_interval is 0, it must be positive"),
        ("qwen35", {"attention.recurrent_layers": [True]}, "key qwen35.attention.recurrent_layers has no entry for"),
        ("qwen35", {"rope.dimension_sections": [2, 1, 1, 1]}, "key qwen35.rope.dimension_sections is [2, 1, 1, 1], "),
        ("qwen35", {"nextn_predict_layers": 2}, "key qwen35.nextn_predict_layers is 2, it must be from 0 to 1; take"),
        ("qwen35", {"nextn_predict_layers": -1}, "key qwen35.nextn_predict_layers is -1, it must be from 0 to 1"),
        ("qwen35", {"nextn_predict_layers": -1 << 60}, "key qwen35.nextn_predict_layers is -1,152,921,504,606,846,976"),
        ("lfm2", {"shortconv.l_cache": None}, "key lfm2.shortconv.l_cache is missing"),
        ("lfm2", {"attention.head_count_kv": 2}, "key lfm2.attention.head_count_kv has no number for each layer"),
        ("lfm2", {"attention.head_count_kv": [2]}, "key lfm2.attention.head_count_kv has no number for each layer"),
        ("lfm2", {"attention.head_count_kv": [0, 0]}, "key lfm2.attention.head_count_kv is 0, it must be a positive"),
        ("lfm2", {"attention.head_count_kv": [1, 2]}, "key lfm2.attention.head_count_kv differs by layer"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_told(architecture: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    keys = (LFM if architecture == "lfm2" else QWEN) | {"full_attention_interval": 2}
    with pytest.raises(CheckpointError) as caught:
        model_of(config_of(tmp_path, keys | changes, architecture=architecture), tmp_path / "model.gguf")
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'model.gguf'}: ")
    assert "\n" not in str(caught.value)
