"""What is resolved before a start and in it: limits, devices, and the blocks that workers have found room for."""

from __future__ import annotations

import pytest
from msgspec import structs

from eventlm.config import Config, GpuConfig, ModelConfig, ParallelConfig, SchedulerConfig
from eventlm.config.core import MAX_BLOCKS
from eventlm.core.shards import Layout
from eventlm.engine.setup import Device, EngineSetup, make_setup, with_blocks, worker_setups
from eventlm.errors import UsageError
from eventlm.launchers.launcher import Launcher


class Elsewhere(Launcher, frozen=True, kw_only=True):
    """Has other hosts."""


GPUS = [Device("cuda:0", "NVIDIA H100"), Device("cuda:1", "NVIDIA A10")]


def setup_with(
    *, devices: list[Device] | None = None, num_blocks: int = 64, gpu: GpuConfig | None = None, **scheduler: int
) -> EngineSetup:
    config = Config(scheduler=SchedulerConfig(**scheduler), gpu=gpu or GpuConfig())
    return make_setup(
        config, model="m", model_name="m", num_blocks=num_blocks, max_model_len=512, devices=devices or []
    )


def test_replicas_take_gpus_in_turn_and_share_their_memory() -> None:
    workers = worker_setups(setup_with(devices=GPUS, replicas=3, gpu=GpuConfig(gpu_memory_utilization="0.9")))
    assert [(worker.device, worker.gpu, worker.gpu_memory_ppm) for worker in workers] == [
        ("cuda:0", "NVIDIA H100", 450_000),
        ("cuda:1", "NVIDIA A10", 900_000),
        ("cuda:0", "NVIDIA H100", 450_000),
    ]


def test_without_gpus_workers_are_on_the_processor() -> None:
    [worker] = worker_setups(setup_with())
    assert (worker.device, worker.gpu) == ("cpu", "")


def test_a_worker_s_setup_for_a_gpu() -> None:
    gpu = GpuConfig(attention_backend="triton", batch_invariant=True, torch_compile=True)
    [worker] = worker_setups(setup_with(devices=GPUS, gpu=gpu, max_steps_in_flight=3))
    assert (worker.attention_backend, worker.batch_invariant, worker.torch_compile) == ("triton", True, True)
    assert worker.max_steps_in_flight == 3


def test_a_worker_holds_the_sequences_of_all_micro_batches() -> None:
    config = Config(parallel=ParallelConfig(pipeline_parallel_size=2, micro_batches=3))
    setup = make_setup(config, model="m", model_name="m", num_blocks=64, max_model_len=512)
    assert [worker.decode_batches for worker in worker_setups(setup)] == [3, 3]


def test_steps_run_as_graphs_on_gpus_unless_that_is_turned_off() -> None:
    setup = setup_with(devices=GPUS, max_num_seqs=20)
    assert setup.core.graph_buckets == [1, 2, 4, 8, 16, 20]
    assert worker_setups(setup)[0].graph_buckets == setup.core.graph_buckets
    assert setup_with(devices=GPUS, gpu=GpuConfig(cuda_graphs=False)).core.graph_buckets == []
    assert setup_with().core.graph_buckets == []


@pytest.mark.parametrize(
    ("devices", "scheduler", "budget"),
    [
        ([], {}, 512),
        (GPUS, {}, 8192),
        ([], {"max_num_seqs": 1000}, 1000),
        (GPUS, {"max_num_seqs": 10_000}, 10_000),
        ([], {"max_num_batched_tokens": 300}, 300),
        (GPUS, {"max_num_batched_tokens": 300}, 300),
    ],
)
def test_a_step_has_the_size_that_suits_the_device(
    devices: list[Device], scheduler: dict[str, int], budget: int
) -> None:
    setup = setup_with(devices=devices, **scheduler)
    assert setup.core.max_num_batched_tokens == budget
    assert worker_setups(setup)[0].max_num_batched_tokens == budget


def test_a_given_size_without_room_for_a_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="--max-num-batched-tokens 100 is less than --max-num-seqs 256"):
        setup_with(devices=GPUS, max_num_batched_tokens=100)


def test_all_replicas_get_the_blocks_of_the_one_that_has_fewest() -> None:
    setup = with_blocks(setup_with(num_blocks=0, replicas=3), [50, 40, 60])
    assert (setup.core.num_blocks, setup.core.max_model_len) == (40, 512)
    assert {(worker.num_blocks, worker.max_model_len) for worker in worker_setups(setup)} == {(40, 512)}


def test_the_context_is_cut_to_what_the_blocks_hold() -> None:
    setup = with_blocks(setup_with(num_blocks=0), [11])
    assert (setup.core.num_blocks, setup.core.max_model_len) == (11, 160)


def test_workers_with_more_room_than_an_engine_can_use_get_what_it_can() -> None:
    setup = with_blocks(setup_with(num_blocks=0, replicas=3), [MAX_BLOCKS] * 3)
    assert setup.core.num_blocks == MAX_BLOCKS // 3


def test_a_setup_whose_blocks_are_known_is_as_it_was() -> None:
    setup = setup_with(replicas=2)
    assert with_blocks(setup, [0, 64]) == setup


@pytest.mark.parametrize(
    ("asked", "found", "message"),
    [
        (
            200,
            11,
            "--max-model-len 200 does not fit: beside the weights there is room for 11 KV blocks, which hold a context "
            "of 160 tokens; lower it, raise --gpu-memory-utilization, or give --kv-cache-dtype fp8",
        ),
        (0, 1, "even the shortest context does not fit: beside the weights there is room for 1 KV blocks"),
    ],
)
def test_a_context_that_does_not_fit_is_an_error(asked: int, found: int, message: str) -> None:
    setup = setup_with(num_blocks=0)
    config = structs.replace(setup.config, model=ModelConfig(max_model_len=asked))
    with pytest.raises(UsageError) as raised:
        with_blocks(structs.replace(setup, config=config), [found])
    assert str(raised.value).startswith(message)


def test_each_rank_has_a_setup_and_its_share_of_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventlm.engine.setup.usable_cores", lambda: 17)
    config = Config(
        scheduler=SchedulerConfig(replicas=2),
        parallel=ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, kv_parallel_size=1),
    )
    setup = make_setup(config, model="m", model_name="m", num_blocks=64, max_model_len=512)
    workers = worker_setups(setup)
    assert [(worker.replica, worker.rank) for worker in workers] == [(r, rank) for r in range(2) for rank in range(4)]
    assert {worker.layout for worker in workers} == {Layout(2, 2, 1)}
    assert {worker.threads for worker in workers} == {2}


def test_every_rank_has_a_gpu_of_its_own() -> None:
    config = Config(parallel=ParallelConfig(tensor_parallel_size=2))
    made = make_setup(config, model="m", model_name="m", num_blocks=64, max_model_len=512, devices=GPUS)
    assert [worker.device for worker in worker_setups(made)] == ["cuda:0", "cuda:1"]
    config = Config(parallel=ParallelConfig(tensor_parallel_size=3))
    with pytest.raises(UsageError, match=r"3 ranks of a replica need a GPU each, and there are 2; .*-per-gpu 2, which"):
        make_setup(config, model="m", model_name="m", num_blocks=64, max_model_len=512, devices=GPUS)


def test_ranks_share_a_gpu_and_its_memory_if_they_may() -> None:
    parallel = ParallelConfig(tensor_parallel_size=3, ranks_per_gpu=2)
    config = Config(parallel=parallel, gpu=GpuConfig(gpu_memory_utilization="0.9"))
    made = make_setup(config, model="m", model_name="m", num_blocks=64, max_model_len=512, devices=GPUS)
    assert [(worker.device, worker.gpu_memory_ppm) for worker in worker_setups(made)] == [
        ("cuda:0", 450_000),
        ("cuda:1", 900_000),
        ("cuda:0", 450_000),
    ]
    assert made.core.graph_buckets == []


def test_on_other_hosts_each_worker_has_a_gpu_of_its_own() -> None:
    config = Config(
        scheduler=SchedulerConfig(replicas=2),
        parallel=ParallelConfig(tensor_parallel_size=2, launcher={"type": f"{__name__}:Elsewhere"}),
        gpu=GpuConfig(gpu_memory_utilization="0.9"),
    )
    made = make_setup(config, model="m", model_name="m", num_blocks=64, max_model_len=512, devices=GPUS[:1])
    assert [worker.gpu_memory_ppm for worker in worker_setups(made)] == [900_000] * 4


def test_a_sequence_of_a_pipeline_has_one_decode_in_flight() -> None:
    def decodes(in_flight: int, stages: int) -> int:
        config = Config(
            scheduler=SchedulerConfig(max_decodes_in_flight_per_seq=in_flight),
            parallel=ParallelConfig(pipeline_parallel_size=stages),
        )
        made = make_setup(config, model="m", model_name="m", num_blocks=64, max_model_len=512)
        return made.core.decodes_in_flight_per_seq

    assert [decodes(in_flight, 1) for in_flight in (0, 1, 3)] == [2, 1, 3]
    assert [decodes(in_flight, 2) for in_flight in (0, 1)] == [1, 1]
    with pytest.raises(UsageError, match="--max-decodes-in-flight-per-seq 2: the first stage of a pipeline needs"):
        decodes(2, 2)
