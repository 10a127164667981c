"""What a step must do at least, against the sums made out by hand."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from eventlm.bench.step.floor import (
    BatchShape,
    ModelFigures,
    StepWork,
    floor_ns,
    integer_matrices,
    num_matrix_weights,
    shape_of,
    step_work,
    total,
)
from eventlm.bench.step.machine_probe import Machine
from eventlm.events import Launched
from eventlm.models.config import kv_bytes_per_token, read_model
from eventlm.models.spec import ExpertsSpec, FeedForwardSpec
from eventlm.models.weights.decoder_weights import model_weights
from tests.checkpoints import make_checkpoint


def test_the_shape_of_a_launch() -> None:
    launch = Launched(
        replica=0,
        epoch=1,
        step=7,
        decodes=[(1, 0, 100, 0), (2, 0, 50, 1)],
        chunks=[(3, 0, 16, 3, 0), (4, 0, 0, 2, 1)],
        num_tokens=7,
        predicted_ns=0,
    )
    shape = shape_of(launch)
    assert (shape.num_tokens, shape.num_sampled) == (7, 3)
    # Two decodes over 100 and 51 tokens; a chunk sees 17, 18 and 19, the other 1 and 2.
    assert shape.kv_tokens() == 100 + 51 + 19 + 2
    assert shape.num_pairs() == 151 + 17 + 18 + 19 + 1 + 2
    # The queries of the first chunk see 18 each but the first, which sees 17; nothing lies before them all.
    assert shape.kv_tokens(18) == 18 + 18 + 19 + 2
    assert shape.num_pairs(18) == 18 + 18 + 17 + 18 + 18 + 1 + 2
    assert shape.kv_tokens(4) == 4 + 4 + 6 + 2
    assert shape.num_pairs(4) == 4 + 4 + 3 * 4 + 1 + 2
    assert (shape.kv_tokens(200), shape.num_pairs(200)) == (shape.kv_tokens(), shape.num_pairs())


def test_the_work_of_a_step(tmp_path: Path) -> None:
    config = read_model(make_checkpoint(tmp_path, num_layers=3))
    weight_bytes = {"qkv_proj": 11, "o_proj": 12, "gate_up_proj": 13, "down_proj": 14, "lm_head": 15}
    shape = BatchShape(num_sampled=2, rows=[(49, 1), (16, 4)])
    kv_token_bytes = kv_bytes_per_token(config, "float32")
    model = ModelFigures(config=config, weight_bytes=weight_bytes, kv_token_bytes=kv_token_bytes)
    work = step_work(model, shape)
    assert {part: work[part].num_bytes for part in weight_bytes} == weight_bytes
    heads = config.num_heads * config.head_dim
    assert work["o_proj"].num_flops == 2 * 5 * 3 * heads * config.hidden_size
    assert work["lm_head"].num_flops == 2 * 2 * config.hidden_size * config.vocab_size
    assert work["attention"].num_flops == 4 * (50 + 17 + 18 + 19 + 20) * 3 * heads
    assert work["attention"].num_bytes == 70 * 2 * 3 * config.num_kv_heads * config.head_dim * 4
    assert {each.num_int8_ops for each in work.values()} == {0}
    in_int8 = step_work(structs.replace(model, integers=integer_matrices(config, "int8", {})), shape)
    for part in weight_bytes:
        assert in_int8[part] == StepWork(work[part].num_bytes, 0, work[part].num_flops)
    assert in_int8["attention"] == work["attention"]
    assert work["rotary"] == StepWork(5 * 2 * 3 * config.num_kv_heads * config.head_dim * 4, 0)


def test_the_work_of_layers_that_differ(tmp_path: Path) -> None:
    same = read_model(make_checkpoint(tmp_path, num_layers=2))
    part = FeedForwardSpec(size=96, is_gated=False)
    windowed = structs.replace(same.layers[0].attention, window=4)
    layers = (same.layers[0], structs.replace(same.layers[1], attention=windowed, feed_forward=part))
    config = structs.replace(same, layers=layers)
    weight_bytes = dict.fromkeys(("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"), 0)
    model = ModelFigures(config=config, weight_bytes=weight_bytes, kv_token_bytes=2 * 100)
    work = step_work(model, BatchShape(num_sampled=1, rows=[(9, 1)]))
    assert work["gate_up_proj"].num_flops == 2 * config.hidden_size * (2 * 160 + 96)
    assert work["down_proj"].num_flops == 2 * config.hidden_size * (160 + 96)
    assert work["attention"] == StepWork(100 * (10 + 4), 4 * config.num_heads * config.head_dim * (10 + 4))


def test_a_token_passes_some_of_the_experts(tmp_path: Path) -> None:
    dense = read_model(make_checkpoint(tmp_path, num_layers=2))
    experts = ExpertsSpec(
        num_experts=8,
        num_active=3,
        expert=FeedForwardSpec(size=32),
        shared=FeedForwardSpec(size=96),
        has_shared_gate=True,
    )
    config = structs.replace(dense, layers=(dense.layers[0], structs.replace(dense.layers[1], feed_forward=experts)))
    hidden = config.hidden_size
    all_weights, active = num_matrix_weights(config), num_matrix_weights(config, is_active=True)
    assert all_weights["experts"] == 8 * 3 * 32 * hidden
    assert active == all_weights | {"experts": 3 * 3 * 32 * hidden}
    assert all_weights["gate_up_proj"] == 2 * (160 + 96) * hidden
    weight_bytes = {part: 2 * number for part, number in all_weights.items()}
    model = ModelFigures(config=config, weight_bytes=weight_bytes, kv_token_bytes=2 * 100)
    shape = BatchShape(num_sampled=1, rows=[(9, 1), (0, 4)])
    work = step_work(model, shape)
    assert work["experts"] == StepWork(2 * active["experts"], 2 * 5 * active["experts"])
    assert work["router"] == StepWork(2 * 8 * hidden, 2 * 5 * 8 * hidden)
    in_int8 = step_work(structs.replace(model, integers=integer_matrices(config, "int8", {})), shape)
    assert in_int8["experts"] == StepWork(2 * active["experts"], 0, 2 * 5 * active["experts"])
    assert in_int8["router"] == work["router"]


def test_floats_of_8_bits_are_not_integers(tmp_path: Path) -> None:
    config = read_model(make_checkpoint(tmp_path, num_layers=2))
    types = {key: "F8_128" if key.layer else "I8_128" for key in model_weights(config) if key.name in ("up", "output")}
    integers = integer_matrices(config, "none", types)
    assert integers == {key for key in types if not key.layer}
    weight_bytes = num_matrix_weights(config)
    model = ModelFigures(config=config, weight_bytes=weight_bytes, kv_token_bytes=2 * 100, integers=integers)
    work = step_work(model, BatchShape(num_sampled=1, rows=[(9, 1)]))
    assert work["o_proj"].num_int8_ops == work["o_proj"].num_flops
    assert work["gate_up_proj"].num_flops == 3 * work["gate_up_proj"].num_int8_ops
    assert {part for part, each in work.items() if each.num_int8_ops} == {"o_proj", "gate_up_proj"}
    # --quantization int4 rounds floats of 8 bits too.
    assert integer_matrices(config, "int4", dict.fromkeys(types, "Q4_1")) == types.keys()


def test_a_floor_is_the_longer_of_the_two() -> None:
    machine = Machine(bytes_per_second=1e9, flops_per_second=1e12)
    works = [StepWork(5_000, 1_000_000), StepWork(1_000, 2_000_000)]
    assert [floor_ns(work, machine) for work in works] == [5_000, 2_000]
    # Of both it is less than the sum: what one part leaves of the multipliers another can use.
    assert floor_ns(total(works), machine) == 6_000


def test_products_of_int8_take_half_the_time() -> None:
    machine = Machine(bytes_per_second=1e12, flops_per_second=1e9)
    works = [StepWork(1, 0, 1_000), StepWork(1, 500)]
    assert [floor_ns(work, machine) for work in works] == [500, 500]
    assert total(works) == StepWork(2, 500, 1_000)
    assert floor_ns(total(works), machine) == 1_000
