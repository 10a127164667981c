"""Rows of a tensor that are in turns, by key head or by head."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from eventlm.models.families.qwen_next import Qwen3NextFields, qwen3_next
from eventlm.models.spec import ModelSpec
from eventlm.models.weights.decoder_weights import model_weights
from eventlm.models.weights.tensor_names import checkpoint_tensors
from eventlm.models.weights.tensor_rows import row_runs, rows_of

FIELDS: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
}


@pytest.fixture
def model() -> ModelSpec:
    return qwen3_next(Qwen3NextFields(**FIELDS))


def rows_in(model: ModelSpec, tensor: str) -> dict[str, list[int]]:
    """The rows of each weight of a tensor, by the weight's name."""
    shapes = model_weights(model)
    rows = rows_of({key: shapes[key] for key in checkpoint_tensors(model)[tensor]}, model)
    return {key.name: [*itertools.chain(*runs)] for key, runs in rows.items()}


def test_queries_keys_values_and_gates_of_each_key_head(model: ModelSpec) -> None:
    found = rows_in(model, "model.layers.0.linear_attn.in_proj_qkvz.weight")
    # 3 of a query, 3 of a key, 10 of two values, 10 of their gates; then those of the second key head.
    queries, keys = [0, 1, 2, 26, 27, 28], [3, 4, 5, 29, 30, 31]
    assert found["mixed"] == [*queries, *keys, *range(6, 16), *range(32, 42)]
    assert found["delta_gate"] == [*range(16, 26), *range(42, 52)]


def test_betas_and_decays_of_each_key_head(model: ModelSpec) -> None:
    found = rows_in(model, "model.layers.0.linear_attn.in_proj_ba.weight")
    assert found == {"delta_beta": [0, 1, 4, 5], "delta_decay": [2, 3, 6, 7]}


def test_the_query_and_the_gate_of_each_head(model: ModelSpec) -> None:
    found = rows_in(model, "model.layers.1.self_attn.q_proj.weight")
    assert found == {"query": [*range(8), *range(16, 24)], "output_gate": [*range(8, 16), *range(24, 32)]}


def test_other_tensors_are_one_weight_after_the_other(model: ModelSpec) -> None:
    shapes = model_weights(model)
    for tensor, keys in checkpoint_tensors(model).items():
        own = {key: shapes[key] for key in keys}
        if not tensor.endswith(("qkvz.weight", "ba.weight", "q_proj.weight")):
            assert [tuple(run) for run in row_runs(own, model)] == [(key, 0, shapes[key][0]) for key in keys]
        rows = [row for runs in rows_of(own, model).values() for row in itertools.chain(*runs)]
        assert sorted(rows) == list(range(sum(shape[0] for shape in own.values())))
