"""A core that drives a runner, with as many steps under way as the core allows."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from eventlm.events import Cancelled, Launched
from eventlm.sampling_params import SamplingParams
from eventlm.types import RequestKind, SequenceId
from eventlm.worker.gpu.runner import GpuRunner
from eventlm.worker.model_runner import ModelRunner
from eventlm.worker.protocol import NewSequence, RowExtras, StepPayload, WorkerSetup
from tests.checkpoints import make_checkpoint
from tests.core.rig import Rig
from tests.worker.launches import new_sequence

BUCKETS = [1, 2, 4, 8]


class Asked(NamedTuple):
    """A request. It comes once `after` steps have completed, and leaves again after `leaves` of them, if that is not 0.

    shares: whether it may be served from the cache, and what it computes is there for others.
    """

    prompt: list[int]
    num_tokens: int
    params: SamplingParams
    n: int = 1
    kind: RequestKind = "generate"
    after: int = 0
    leaves: int = 0
    shares: bool = False
    priority: int = 0


class Sample(NamedTuple):
    """One of the sequences that were asked for: the request's number in the list, and which one of its `n`."""

    number: int
    index: int


def small_checkpoint(folder: Path) -> Path:
    """One layer: each program of a kernel takes Triton's interpreter half a millisecond."""
    return make_checkpoint(folder, num_heads=2, num_kv_heads=1, num_layers=1)


def gpu_runner(folder: Path, **changes: Any) -> GpuRunner:
    """Of `gpu_setup`."""
    return GpuRunner(gpu_setup(folder, **changes))


def gpu_setup(folder: Path, **changes: Any) -> WorkerSetup:
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
    }
    fields |= changes
    fields.setdefault("graph_buckets", [bucket for bucket in BUCKETS if bucket <= fields["max_num_seqs"]])
    return WorkerSetup(**fields)


class Driven:
    """Requests on a runner, run to their ends. `launches` are all that were made.

    `samples` are all tokens of each sequence, also those behind an end that a step under way could not know of;
    `reasons` say why each ended, and with how many tokens.
    """

    def __init__(self, runner: GpuRunner | ModelRunner, asked: list[Asked], *, depth: int = 2, **limits: int) -> None:
        setup = runner.setup
        self._runner = runner
        self._block_size = setup.block_size
        self.rig = Rig(
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
        self.samples: dict[Sample, list[int]] = {}
        self.extras: dict[Sample, list[RowExtras]] = {}
        self._asked = asked
        self._requests: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        #: An integer for all that precedes the end of a full block.
        self._names: dict[tuple[int, ...], int] = {}
        self._num_named: dict[Sample, int] = {}
        self._num_steps = 0
        self._run()

    @property
    def outputs(self) -> dict[int, list[int]]:
        """The tokens of each request's first sequence."""
        return {sample.number: tokens for sample, tokens in self.samples.items() if not sample.index}

    @property
    def reasons(self) -> dict[Sample, tuple[str, int]]:
        """Why each sequence ended, and with how many tokens."""
        return {
            Sample(self._numbers[request], index): (reason, position)
            for request, index, reason, position in self.rig.finished()
        }

    def _come_and_go(self) -> None:
        for number, asked in enumerate(self._asked):
            if number not in self._requests and (asked.after <= self._num_steps or not self.rig.flying[0]):
                self._arrive(number, asked)
            elif number in self._requests and asked.leaves == self._num_steps > 0:
                self.rig.feed(Cancelled(c=self._requests[number], request=self._requests[number]))

    def _arrive(self, number: int, asked: Asked) -> None:
        for index in range(asked.n):
            self.samples[Sample(number, index)] = []
            self._num_named[Sample(number, index)] = len(asked.prompt) // self._block_size
        request = self.rig.arrive(
            len(asked.prompt),
            asked.num_tokens,
            n=asked.n,
            kind=asked.kind,
            priority=asked.priority,
            blocks=self._named(asked.prompt, 0) if asked.shares else [],
            skip_cache_read=not asked.shares,
        )
        self._requests[number], self._numbers[request] = request, number

    def _named(self, token_ids: list[int], first: int) -> list[int]:
        """Of the full blocks from `first` on."""
        ends = range(self._block_size * (first + 1), len(token_ids) + 1, self._block_size)
        return [self._names.setdefault(tuple(token_ids[:end]), len(self._names) + 1) for end in ends]

    def _run(self) -> None:
        self._come_and_go()
        while self.rig.flying[0]:
            for launch in list(self.rig.flying[0])[len(self._under_way) :]:
                self._under_way.append((launch, self._runner.start(launch, self._payload(launch))))
                self.launches.append(launch)
            self._finish()
            self._num_steps += 1
            self._come_and_go()
        forget = [(identity.request, identity.index) for identity in sorted(self._held)]
        last = Launched(replica=0, epoch=1, step=0, forget=forget, num_tokens=0, predicted_ns=0)
        self._runner.start(last, StepPayload()).finish()

    def _finish(self) -> None:
        launch, step = self._under_way.popleft()
        output = step.finish()
        rows = [Sample(self._numbers[row.request], row.index) for row in _rows(launch)]
        filled = []
        for number, (row, produced) in enumerate(zip(rows, output.tokens, strict=True)):
            self.samples[row] += produced
            if self._asked[row.number].shares:
                names = self._filled(launch, number, row)
                filled += [(number, names)] if names else []
        for extras in output.extras:
            self.extras.setdefault(rows[extras.row], []).append(extras)
        self.rig.complete(produced=list(map(len, output.tokens)), ends=output.ends, filled=filled)

    def _filled(self, launch: Launched, number: int, row: Sample) -> list[int]:
        """Names of the blocks of whose tokens the step has stored the last one."""
        history = self._asked[row.number].prompt + self.samples[row]
        num_stored = len(history) - 1
        if number >= len(launch.decodes):
            _, _, start, num_tokens, _ = launch.chunks[number - len(launch.decodes)]
            num_stored = start + num_tokens
        names = self._named(history[:num_stored], self._num_named[row])
        self._num_named[row] += len(names)
        return names

    def _payload(self, launch: Launched) -> StepPayload:
        self._held -= {SequenceId(*each) for each in launch.forget}
        new = [row for row in _rows(launch) if row not in self._held]
        self._held.update(new)
        return StepPayload(new=[self._new(row) for row in new])

    def _new(self, row: SequenceId) -> NewSequence:
        number = self._numbers[row.request]
        asked, output = self._asked[number], self.samples[Sample(number, row.index)]
        return new_sequence(
            row.request,
            [*asked.prompt, *output],
            index=row.index,
            num_prompt_tokens=len(asked.prompt),
            params=asked.params,
            kind=asked.kind,
        )


def _rows(launch: Launched) -> list[SequenceId]:
    return [SequenceId(row[0], row[1]) for row in [*launch.decodes, *launch.chunks]]
