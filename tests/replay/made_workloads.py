"""Workloads made from a seed, and engines to simulate them on."""

from __future__ import annotations

import random
from typing import Any

from eventlm.config.load import load_config
from eventlm.engine.setup import EngineSetup, make_setup
from eventlm.events import Arrived
from eventlm.replay.cost.model import LinearCost
from eventlm.replay.workload.workload import Cancel, SequenceOutput, TextEnd, Workload, WorkloadRequest
from eventlm.scheduling_params import SchedulingParams

MILLISECOND = 1_000_000
#: 2 ms a step, 20 us a prefill token: a small engine that a few requests a second keep busy.
COST = LinearCost(base_ps=2_000_000_000, prefill_ps=20_000_000, decode_ps=50_000_000, context_ps=1_000)
PREDICTOR = COST.coefficients()


def make_engine(*, num_blocks: int = 64, max_model_len: int = 512, **options: Any) -> EngineSetup:
    """An engine with these options of the configuration."""
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 128} | options
    config = load_config(None, options, environment={})
    return make_setup(config, model="made", model_name="made", num_blocks=num_blocks, max_model_len=max_model_len)


def make_workload(seed: int, *, num_requests: int = 40, block_size: int = 16) -> Workload:
    """Requests of all kinds: shared prefixes, samples, cancels, text ends, turns, deadlines, some too long."""
    draw = random.Random(seed)
    requests: list[WorkloadRequest] = []
    arrival_ns = 0
    for index in range(num_requests):
        arrival_ns += draw.randrange(60) * MILLISECOND
        prompt_tokens = draw.choice((5, 40, 120, 300, 600))
        num_outputs = draw.randrange(1, 40)
        shared = draw.randrange(prompt_tokens // block_size + 1)
        family = draw.randrange(3)
        blocks = [1 + family * 100 + i for i in range(shared)]
        blocks += [1000 + index * 100 + i for i in range(prompt_tokens // block_size - shared)]
        n = draw.choice((1, 1, 1, 3))
        ends_early = draw.random() < 0.3
        has_text_ends = draw.random() < 0.2
        outputs = [
            SequenceOutput(
                worker_end=num_outputs if ends_early else 1 << 62,
                text_end=TextEnd(position=max(num_outputs // 2, 1), reason="stop", delay_ns=3 * MILLISECOND)
                if has_text_ends
                else None,
            )
            for _ in range(n)
        ]
        is_turn = index > 0 and draw.random() < 0.2
        requests.append(
            WorkloadRequest(
                arrival=Arrived(
                    prompt_tokens=prompt_tokens,
                    blocks=blocks,
                    max_tokens=40 if ends_early else num_outputs,
                    n=n,
                    scheduling=SchedulingParams(
                        model="",
                        priority=draw.choice((0, 0, 0, 1)),
                        deadline_ns=draw.choice((0, 200 * MILLISECOND)),
                        has_text_ends=has_text_ends,
                    ),
                ),
                arrival_ns=arrival_ns,
                outputs=outputs,
                cancel=Cancel(index=0, position=2, delay_ns=MILLISECOND) if draw.random() < 0.1 else None,
                parent=draw.randrange(index) if is_turn else -1,
                think_ns=draw.choice((None, 50 * MILLISECOND)) if is_turn else None,
            )
        )
    return Workload(source=f"seed {seed}", requests=requests, block_size=block_size, first_free_name=1 << 20)
