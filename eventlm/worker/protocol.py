"""What travels between the engine and a worker process, as msgpack over ZMQ. No pickle, no code.

The engine sends `WorkerSetup`, the worker reports `StartProgress` until it answers `WorkerReady`, then the engine sends
steps. A step is two frames: the launch event's line body, byte for byte as in the log, and a
`StepPayload` with what the log does not hold. The worker answers each step with a `StepResult`, in order, or once with
`WorkerDesync` or `WorkerFailed`. Between the steps the engine sends grammars (`PrepareGrammar`), each answered with
`GrammarBuilt` as soon as that is known.

A replica of several ranks is as many workers. All of them get every step, and those that draw tokens get grammars: the
answering rank, and on GPUs all of the last stage. Only the answering rank answers steps; the others say that they are
still there, or how they failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Union

import msgspec
from msgspec import Struct, structs

from eventlm.core.predictor import StepShape
from eventlm.core.shards import Layout
from eventlm.sampling_params import SamplingParams, TokenLogprobs
from eventlm.types import ModelImpl, RequestKind, WorkerEnd
from eventlm.worker.rank_memory import RankMemory

#: `WorkerSetup.model` of a worker without one.
FAKE_MODEL = "fake"
#: `attention_backend` of a worker's host that computes in torch's operations.
TORCH_BACKEND = "torch_sdpa_gather"
#: Attention backends of GPUs, the one that `auto` tries first first; packages offer others under the group of entry
#: points.
GPU_BACKENDS = ("triton", "flash_attn", "torch_sdpa")
GPU_BACKEND_GROUP = "eventlm.attention_backends"


def backend_name(build: str) -> str:
    """`attention_backend` of a worker's host with this build of `eventlm.kernels.cpu`."""
    return f"cpu_{build}"


def transformers_backend(build: str, *, attends: bool = True) -> str:
    """The same where transformers computes the model, with the products of this build; empty: with torch's.

    attends: whether its attention is the build's too, and not torch's.
    """
    return f"transformers_{build or 'torch'}{'' if attends else '_torch_attention'}"


class Peers(Struct, frozen=True, kw_only=True):
    """How the ranks of one replica meet.

    shared_memory: a folder of a file system in memory, empty when the first of them starts and theirs alone, in which
    those of one host make the files that they share; empty: this one is alone on its host. Its maker removes it when
    all have ended. address: `HOST:PORT` of the store of torch.distributed, which the first rank opens; empty: all are
    on one host. host: the name or address by which the others reach this rank. neighbours: with an address and a
    folder, the ranks that have this folder.
    """

    shared_memory: str = ""
    address: str = ""
    host: str = ""
    neighbours: list[int] = []

    def share_memory(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks have the folder."""
        return bool(self.shared_memory) and (not self.address or set(ranks).issubset(self.neighbours))


class WorkerSetup(Struct, frozen=True, kw_only=True, tag="setup"):
    """What a worker must know before it can start. `model` is a checkpoint folder, or `FAKE_MODEL`; `tokenizer` the
    folder of a tokenizer in place of the model's own, or empty.

    device: `cpu`, or a GPU as torch names it, `cuda:0`; gpu: what its maker calls that. num_blocks: 0 on a GPU: as many
    as a profiling run finds room for. state_slots: of recurrent layers; 0: the
    model has none.
    """

    replica: int
    epoch: int
    model: str
    tokenizer: str = ""
    dtype: str = "auto"
    quantization: str = "none"
    #: As the option of that name.
    model_impl: ModelImpl = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int
    num_blocks: int
    state_slots: int = 0
    max_model_len: int
    max_num_batched_tokens: int
    #: Of one step. It holds `decode_batches` times as many.
    max_num_seqs: int
    decode_batches: int = 1
    max_steps_in_flight: int = 2
    device: str = "cpu"
    gpu: str = ""
    threads: int = 0
    #: One for each thread, which is kept there; empty: the system moves them.
    processors: list[int] = []
    #: As the option of that name.
    cpu_kernels: str = "auto"
    #: As the options of these names, of a worker on a GPU.
    attention_backend: str = "auto"
    batch_invariant: bool = False
    torch_compile: bool = False
    #: Share of the GPU's whole memory that this worker may take, in parts per million.
    gpu_memory_ppm: int = 900_000
    #: Numbers of rows for which a step that only decodes is captured as a CUDA graph; empty: none is.
    graph_buckets: list[int] = []
    #: The worker sends a heartbeat this often, from a thread of its own.
    heartbeat_ns: int = 1_000_000_000
    #: Measure steps of several shapes before being ready, so that the engine can fit its predictor.
    warm_up: bool = True
    #: Answer each step with the time of each of its operations.
    profile_ops: bool = False
    #: Parameters of the fake worker.
    fake: dict[str, Any] = {}
    #: Of a replica of several ranks: how they share the model, which one this is, and how they meet.
    layout: Layout = Layout()
    rank: int = 0
    #: Tokens of a context that one KV group holds before the next one goes on; 0: there is one group.
    kv_shard_tokens: int = 0
    #: What it takes of its host's memory, for a launcher that plans by it.
    memory: RankMemory | None = None
    peers: Peers = Peers()
    #: Of a rank on another host than the engine's: it leaves when it has had no pulse for so long. 0: the engine sends
    #: none, because a rank on its host sees that it has died.
    silence_ns: int = 0
    #: The process of an engine that takes over a worker of one that has died; 0: it has started it.
    engine_pid: int = 0

    @property
    def lasting(self) -> WorkerSetup:
        """The same in all epochs of a worker."""
        return structs.replace(self, epoch=0, warm_up=False, engine_pid=0)


class NewSequence(Struct, frozen=True, kw_only=True):
    """A sequence that the worker does not hold: its whole history, prompt first."""

    request: int
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    kind: RequestKind = "generate"


class StepPayload(Struct, frozen=True, kw_only=True, tag="step"):
    """Beside a launch: the sequences among its rows that the worker does not hold.

    results: to stages that do not sample, what earlier steps have produced since the last payload: the number of each,
    and the tokens of its rows. They hold all that the rows of this launch compute. forced: for each row the tokens to
    go on with in place of those that it produces, which are answered all the same. Empty: none are forced.
    """

    new: list[NewSequence] = []
    forced: list[list[int]] = []
    results: list[tuple[int, list[list[int]]]] = []


class PrepareGrammar(Struct, frozen=True, kw_only=True, tag="grammar"):
    """Build the matcher of a grammar, so that sequences that come with it need not wait. `key` is the answer's."""

    key: int
    grammar: str


class Shutdown(Struct, frozen=True, tag="shutdown"):
    """Leave cleanly."""


class Pulse(Struct, frozen=True, tag="pulse"):
    """To a rank on another host, by a way of its own: the engine is still there. `sent_ns` is the time of its clock."""

    sent_ns: int


class StepSample(Struct, frozen=True, kw_only=True):
    """A measured step of the warm-up."""

    shape: StepShape
    duration_ns: int


class StartProgress(Struct, frozen=True, kw_only=True, tag="start"):
    """What a worker does before it is ready, in words; each is a sign that it goes on.

    done: so much of `total`, in bytes of weights, or kernels; 0 of 0 where nothing is counted.
    """

    epoch: int
    phase: str
    done: int = 0
    total: int = 0


class WorkerReady(Struct, frozen=True, kw_only=True, tag="ready"):
    """The worker holds the model and takes steps.

    num_blocks: KV blocks that it has; 0: as many as it was asked for. notes: what the log should have of its start.
    version: of its code.
    """

    epoch: int
    pid: int
    version: str = ""
    num_blocks: int = 0
    notes: list[str] = []
    model_fingerprint: str = ""
    host: dict[str, Any] = {}
    samples: list[StepSample] = []


class RowExtras(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a row of a step gave beside its tokens, where its request asked for it.

    logprobs: of the tokens that it produced. prompt_logprobs: of consecutive prompt tokens, the first of which is at
    `prompt_start` (never 0: nothing predicts the first token of a prompt). embedding: of a `pool` request's whole
    prompt, little-endian float32.
    """

    row: int
    logprobs: TokenLogprobs | None = None
    prompt_start: int = 0
    prompt_logprobs: TokenLogprobs | None = None
    embedding: bytes = b""


class StepOutput(NamedTuple):
    """What a runner gives for a step; see `StepResult`."""

    tokens: list[list[int]]
    ends: list[tuple[int, WorkerEnd]]
    extras: list[RowExtras]
    ops: dict[str, int]
    stages: list[tuple[int, int]] = []


class StepResult(Struct, frozen=True, kw_only=True, tag="result"):
    """Tokens of one step. Times are this machine's monotonic clock. `tokens` has one list a row of the launch.

    A row that ends with `error` and has no token had logits or hidden states that are not finite; it has no extras.

    `extras` is sparse. `ops` has the time of each operation of the step in nanoseconds, if the worker was asked for it.
    stages: of a pipeline, when each stage began and ended, the first one first, each on its own host's clock.
    """

    epoch: int
    step: int
    start_ns: int
    end_ns: int
    tokens: list[list[int]]
    ends: list[tuple[int, WorkerEnd]] = []
    extras: list[RowExtras] = []
    ops: dict[str, int] = {}
    stages: list[tuple[int, int]] = []


class GrammarBuilt(Struct, frozen=True, kw_only=True, tag="built"):
    """The matcher of a grammar is there, or why there is none; that may quote the grammar."""

    epoch: int
    key: int
    error: str = ""


class WorkerDesync(Struct, frozen=True, kw_only=True, tag="desync"):
    """The launch and the worker disagree on a sequence; nothing of this step or later ones is computed."""

    epoch: int
    step: int
    detail: str


class WorkerFailed(Struct, frozen=True, kw_only=True, tag="failed"):
    """The worker cannot go on; `message` is for a person.

    exit_code: of an error that the user can fix; 0 for a defect, which has a `traceback`. lost_peer: it has only
    noticed that another rank is gone, whose own end says why. step: the one that failed; -1: none was in hand.
    """

    epoch: int
    message: str
    exit_code: int = 0
    traceback: str = ""
    lost_peer: bool = False
    step: int = -1


class Heartbeat(Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """Still there. `busy_ns` is how long the current step has been running, 0 between steps.

    step: the current one, -1 between steps. waits: it waits for another rank of its replica. pulse_ns, clock_ns: of one
    that answers a pulse: what that said, and the time on the rank's own clock.
    """

    epoch: int
    busy_ns: int = 0
    step: int = -1
    waits: bool = False
    pulse_ns: int = 0
    clock_ns: int = 0


ToWorker = Union[WorkerSetup, StepPayload, PrepareGrammar, Shutdown]  # noqa: UP007
FromWorker = Union[  # noqa: UP007
    StartProgress, WorkerReady, StepResult, GrammarBuilt, WorkerDesync, WorkerFailed, Heartbeat
]

decode_pulse = msgspec.msgpack.Decoder(Pulse).decode
encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
