"""A core that drives a runner, with as many steps under way as the core allows."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from eventlm.events import Launched
from eventlm.sampler_params import SamplerParams
from eventlm.types import SequenceId
from eventlm.worker.gpu.runner import GpuRunner
from eventlm.worker.model_runner import ModelRunner
from eventlm.worker.protocol import RowExtras, StepPayload, WorkerSetup
from tests.core.rig import Rig
from tests.worker.launches import new_sequence

BUCKETS = [1, 2, 4, 8]


class Asked(NamedTuple):
    """A request of one sequence."""

    prompt: list[int]
    num_tokens: int
    params: SamplerParams
    arrives_with: int = 0


def gpu_runner(folder: Path, **changes: Any) -> GpuRunner:
    """With blocks of 16 tokens, in float32 unless told otherwise."""
    fields: dict[str, Any] = {
        "replica": 0,
        "epoch": 1,
        "model": str(folder),
        "dtype": "float32",
        "device": "cuda:0",
        "block_size": 16,
        "num_blocks": 32,
        "max_model_len": 128,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "graph_buckets": BUCKETS,
    }
    return GpuRunner(WorkerSetup(**{**fields, **changes}))


class Driven:
    """Requests on a runner, run to their ends. `launches` are all that were made; `outputs`, `extras` by request."""

    def __init__(self, runner: GpuRunner | ModelRunner, asked: list[Asked], *, depth: int = 2, **limits: int) -> None:
        setup = runner.setup
        self._runner = runner
        self._rig = Rig(
            block_size=setup.block_size,
            num_blocks=setup.num_blocks,
            max_model_len=setup.max_model_len,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_steps_in_flight=depth,
            max_decodes_in_flight_per_seq=depth,
            graph_buckets=setup.graph_buckets,  # type: ignore[arg-type]
            **limits,
        )
        self._held: set[SequenceId] = set()
        self._under_way: deque[tuple[Launched, Any]] = deque()
        self.launches: list[Launched] = []
        self.outputs: dict[int, list[int]] = {}
        self.extras: dict[int, list[RowExtras]] = {}
        self._asked: dict[int, Asked] = {}
        self._numbers: dict[int, int] = {}
        for number, each in enumerate(asked):
            self._arrive(number, each)
        self._run()

    def _arrive(self, number: int, asked: Asked) -> None:
        request = self._rig.arrive(len(asked.prompt), asked.num_tokens)
        self._asked[request], self._numbers[request] = asked, number
        self.outputs[number] = []

    def _run(self) -> None:
        while self._rig.flying[0]:
            for launch in list(self._rig.flying[0])[len(self._under_way) :]:
                self._under_way.append((launch, self._runner.start(launch, self._payload(launch))))
                self.launches.append(launch)
            self._finish()
        forget = [(identity.request, identity.index) for identity in sorted(self._held)]
        last = Launched(replica=0, epoch=1, step=0, forget=forget, num_tokens=0, predicted_ns=0)
        self._runner.start(last, StepPayload()).finish()

    def _finish(self) -> None:
        launch, step = self._under_way.popleft()
        output = step.finish()
        rows = _rows(launch)
        for row, produced in zip(rows, output.tokens, strict=True):
            self.outputs[self._numbers[row.request]] += produced
        for extras in output.extras:
            self.extras.setdefault(self._numbers[rows[extras.row].request], []).append(extras)
        self._rig.complete(produced=list(map(len, output.tokens)), ends=output.ends)

    def _payload(self, launch: Launched) -> StepPayload:
        self._held -= {SequenceId(*each) for each in launch.forget}
        new = [row for row in _rows(launch) if row not in self._held]
        self._held.update(new)
        return StepPayload(new=[self._new(row) for row in new])

    def _new(self, row: SequenceId) -> Any:
        asked, output = self._asked[row.request], self.outputs[self._numbers[row.request]]
        return new_sequence(
            row.request, [*asked.prompt, *output], num_prompt_tokens=len(asked.prompt), params=asked.params
        )


def _rows(launch: Launched) -> list[SequenceId]:
    return [SequenceId(row[0], row[1]) for row in [*launch.decodes, *launch.chunks]]
