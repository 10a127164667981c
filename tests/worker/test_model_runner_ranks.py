"""Runners that share a model, against the one that has all of it, on the same launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventlm.core.shards import Layout
from eventlm.kernels.cpu.native import available_builds
from eventlm.sampling_params import SamplingParams
from eventlm.worker.protocol import Peers, StepOutput
from tests.models.families.proof import SMALL, make_checkpoint
from tests.worker.launches import launched, new_sequence, payload
from tests.worker.ranks.replica import Replica, Talk, assert_alike
from tests.worker.ranks.test_gloo import free_port
from tests.worker.reference import make_runner
from tests.worker.test_model_runner_not_finite import BROKEN_ID, break_token

LLAMA: dict[str, Any] = {"architecture": "LlamaForCausalLM", "attention_bias": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "num_hidden_layers": 3},
    "three key heads, tied": {
        **LLAMA,
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "experts": {
        "architecture": "Qwen3MoeForCausalLM",
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "hybrid": {
        "architecture": "Lfm2ForCausalLM",
        "num_hidden_layers": 3,
        "full_attn_idxs": [1],
        "block_multiple_of": 32,
    },
}
T2, S2, BOTH = Layout(2, 1), Layout(1, 2), Layout(2, 2)
CASES = [
    ("llama", Layout(3, 1)),
    ("llama", Layout(1, 3)),
    ("llama", BOTH),
    ("three key heads, tied", T2),
    ("three key heads, tied", S2),
    ("experts", T2),
    ("experts", S2),
    ("hybrid", T2),
    ("hybrid", S2),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By model."""
    found = {}
    for name, fields in MODELS.items():
        found[name] = tmp_path_factory.mktemp("model")
        make_checkpoint(found[name], **{**SMALL, "vocab_size": 300, **fields})
    return found


def talk(runner: Any, name: str) -> list[StepOutput]:
    return Talk(vocab_size=300, has_states=name == "hybrid").run(runner)


def fields_of(name: str, **others: Any) -> dict[str, Any]:
    return {"state_slots": 16 if name == "hybrid" else 0, **others}


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_ranks_compute_what_one_worker_does(
    folders: dict[str, Path], name: str, layout: Layout, tmp_path: Path
) -> None:
    fields = fields_of(name)
    expected = talk(make_runner(folders[name], **fields), name)
    replica = Replica(folders[name], layout, Peers(shared_memory=str(tmp_path)), **fields)
    found = talk(replica, name)
    assert_alike(found, expected, tolerance=1e-4)
    rows = [each for each in found if each.tokens]
    assert {len(each.stages) for each in rows} == {layout.stages if layout.stages > 1 else 0}


@pytest.mark.skipif(not available_builds(), reason="no build of the forward pass is compiled")
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_stages_of_a_compiled_decoder_give_the_bits_of_one(
    folders: dict[str, Path], quantization: str, tmp_path: Path
) -> None:
    fields = fields_of("llama", dtype="bfloat16", quantization=quantization, block_size=16)
    expected = talk(make_runner(folders["llama"], **fields), "llama")
    found = talk(Replica(folders["llama"], S2, Peers(shared_memory=str(tmp_path)), **fields), "llama")
    assert [each._replace(stages=[]) for each in found] == expected


@pytest.mark.skipif(not available_builds(), reason="no build of the forward pass is compiled")
@pytest.mark.parametrize(
    ("dtype", "quantization", "kernels"),
    [("float32", "none", "torch"), ("bfloat16", "none", "auto"), ("bfloat16", "int4", "auto")],
)
def test_gloo_and_shared_memory_give_the_same_bits(
    folders: dict[str, Path],
    dtype: str,
    quantization: str,
    kernels: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = fields_of("llama", dtype=dtype, quantization=quantization, cpu_kernels=kernels, block_size=16)

    def talk_over(name: str) -> list[StepOutput]:
        (tmp_path / name).mkdir()
        outputs = talk(Replica(folders["llama"], BOTH, Peers(shared_memory=str(tmp_path / name)), **fields), "llama")
        return [each._replace(stages=[]) for each in outputs]

    shared = talk_over("shared")
    # As where there is no compiler.
    monkeypatch.setattr("eventlm.worker.ranks.connect.available_builds", list)
    assert talk_over("carried") == shared


def test_ranks_of_several_hosts(folders: dict[str, Path]) -> None:
    """They have no memory in common."""
    expected = talk(make_runner(folders["llama"]), "llama")
    peers = Peers(address=f"127.0.0.1:{free_port()}", host="127.0.0.1")
    found = talk(Replica(folders["llama"], BOTH, peers), "llama")
    assert_alike(found, expected, tolerance=1e-4)


def test_each_rank_measures_its_own_stage(folders: dict[str, Path], tmp_path: Path) -> None:
    replica = Replica(folders["llama"], BOTH, Peers(shared_memory=str(tmp_path)))
    samples = replica.on_all(lambda rank: replica.runners[rank].warm_up())
    assert [[each.shape for each in found] for found in samples] == [[each.shape for each in samples[0]]] * 4
    # As before.
    expected = talk(make_runner(folders["llama"]), "llama")
    assert_alike(talk(replica, "llama"), expected, tolerance=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("extras", [{}, {"logprobs": 1, "prompt_logprobs": 1}])
def test_all_ranks_know_which_rows_are_not_finite(dtype: str, extras: dict[str, Any], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **{**SMALL, "vocab_size": 300, **LLAMA})
    break_token(tmp_path)
    (tmp_path / "memory").mkdir()
    params = SamplingParams(temperature=0.0, ignore_eos=True, **extras)
    fields = fields_of("llama", dtype=dtype, block_size=16)

    def serve(runner: Any) -> list[StepOutput]:
        new = [new_sequence(number, [9, *middle, 8], params=params) for number, middle in enumerate([[7], [BROKEN_ID]])]
        chunks = [(0, 0, 0, 3, 1), (1, 0, 0, 3, 1)]
        first = runner.execute(launched(0, chunks=chunks, blocks=[(0, 0, [1]), (1, 0, [2])]), payload(*new))
        # The engine learns of the end while a step of both is on its way.
        decodes = [(0, 0, 4, 0), (1, 0, 3, 0)]
        second = runner.execute(launched(1, decodes=decodes), payload())
        return [first, second, runner.execute(launched(2, decodes=[(0, 0, 5, 0)], forget=[(1, 0)]), payload())]

    expected = serve(make_runner(tmp_path, **fields))
    found = serve(Replica(tmp_path, BOTH, Peers(shared_memory=str(tmp_path / "memory")), **fields))
    assert [(1, "error")] == expected[0].ends == found[0].ends
    assert [len(row) for row in found[0].tokens] == [1, 0]
    assert_alike(found, expected, tolerance=1e-4 if dtype == "float32" else 0.1)
