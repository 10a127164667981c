"""What a step must do at least, against the sums made out by hand."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from eventlm.bench.step.floor import BatchShape, ModelFigures, StepWork, floor_ns, shape_of, step_work, total
from eventlm.bench.step.machine_probe import Machine
from eventlm.events import Launched
from eventlm.models.config import kv_bytes_per_token, read_config
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
    # Two decodes over 100 and 51 tokens; a chunk sees 17, 18 and 19, the other 1 and 2.
    assert shape_of(launch) == BatchShape(
        num_tokens=7, num_sampled=3, kv_tokens=100 + 51 + 19 + 2, num_pairs=151 + 17 + 18 + 19 + 1 + 2
    )


def test_the_work_of_a_step(tmp_path: Path) -> None:
    config = read_config(make_checkpoint(tmp_path, num_layers=3))
    weight_bytes = {"qkv_proj": 11, "o_proj": 12, "gate_up_proj": 13, "down_proj": 14, "lm_head": 15}
    shape = BatchShape(num_tokens=5, num_sampled=2, kv_tokens=70, num_pairs=90)
    kv_token_bytes = kv_bytes_per_token(config, "float32")
    model = ModelFigures(config=config, weight_bytes=weight_bytes, kv_token_bytes=kv_token_bytes, is_int8=False)
    work = step_work(model, shape)
    assert {part: work[part].num_bytes for part in weight_bytes} == weight_bytes
    heads = config.num_heads * config.head_dim
    assert work["o_proj"].num_flops == 2 * 5 * 3 * heads * config.hidden_size
    assert work["lm_head"].num_flops == 2 * 2 * config.hidden_size * config.vocab_size
    assert work["attention"].num_flops == 4 * 90 * 3 * heads
    assert work["attention"].num_bytes == 70 * 2 * 3 * config.num_kv_heads * config.head_dim * 4
    assert {each.num_int8_ops for each in work.values()} == {0}
    in_int8 = step_work(structs.replace(model, is_int8=True), shape)
    for part in weight_bytes:
        assert in_int8[part] == StepWork(work[part].num_bytes, 0, work[part].num_flops)
    assert in_int8["attention"] == work["attention"]
    assert work["rotary"] == StepWork(5 * 2 * 3 * config.num_kv_heads * config.head_dim * 4, 0)


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
