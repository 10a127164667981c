"""A worker on a GPU, Triton's interpreter in its place, that dies in a step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from eventlm.config import Config, ModelConfig, RecordConfig, SchedulerConfig
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.request import Request
from eventlm.engine.setup import Device, make_setup
from eventlm.events import WorkerLost
from eventlm.sampling_params import SamplingParams
from eventlm.scheduling_params import SchedulingParams
from eventlm.system.system import real_system
from tests.checkpoints import VOCAB_SIZE
from tests.engine.engines import Reader, recorded, verified
from tests.worker.gpu.driven import Asked, Driven, small_checkpoint
from tests.worker.reference import make_runner

NUM_TOKENS = 10
PROMPTS = [[5, 6, 7], [300, 200, 100, 50, 25]]
PARAMS = [
    SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=7, ignore_eos=True),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, frequency_penalty=0.5, ignore_eos=True),
]


async def test_a_worker_that_is_killed_in_a_step_costs_no_token(tmp_path: Path) -> None:
    folder = small_checkpoint(tmp_path / "model")
    config = Config(
        model=ModelConfig(model=str(folder), dtype="float32"),
        scheduler=SchedulerConfig(max_num_seqs=4, max_steps_in_flight=2, max_decodes_in_flight_per_seq=2),
        record=RecordConfig(record=str(tmp_path), validate_every=1),
    )
    engine = InferenceEngine(
        make_setup(
            config,
            model=str(folder),
            model_name="m",
            num_blocks=32,
            max_model_len=128,
            vocab_size=VOCAB_SIZE,
            devices=[Device("cuda:0", "Triton's interpreter")],
        ),
        real_system(),
    )
    try:
        await engine.start()
        group = [
            Request(prompt_token_ids=prompt, sampling=params, scheduling=SchedulingParams(model="m"))
            for prompt, params in zip(PROMPTS, PARAMS, strict=True)
        ]
        readers = [Reader(handle) for handle in await engine.submit(group)]
        await readers[1].until_tokens(3)
        os.kill(engine.worker_pids[0], signal.SIGKILL)
        found = [(await reader.done()).tokens[0] for reader in readers]
    finally:
        await engine.stop()
    asked = [Asked(prompt, NUM_TOKENS, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    expected = Driven(make_runner(folder, threads=0), asked, depth=1)
    assert found == list(expected.outputs.values())
    lost = [event for event in recorded(engine) if isinstance(event, WorkerLost)]
    assert [(event.replica, event.epoch, event.reason) for event in lost] == [(0, 1, "died (killed by SIGKILL)")]
    verified(engine)
