"""Worker processes of a re-execution: those of a replica for each of its worker epochs, one step at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import structs

from eventlm._version import __version__
from eventlm.config.core import MAX_RANKS_OF_REPLICA
from eventlm.core.recorded_layouts import recorded_layouts
from eventlm.core.shards import Layout
from eventlm.engine.replicas.rank_group import GRACE_SECONDS, Loss, RankGroup
from eventlm.engine.request import EngineUnavailableError
from eventlm.engine.setup import Device, describe_host
from eventlm.errors import CheckpointError, EventLMError, UsageError
from eventlm.events import Header, Launched
from eventlm.formatting import counted
from eventlm.kernels.cpu.native import BUILDS, available_builds
from eventlm.launchers.process import ProcessLauncher
from eventlm.launchers.process_memory import check_process_memory
from eventlm.models.config import model_fingerprint
from eventlm.models.cpu_kernels import AUTO, TORCH
from eventlm.replay.execute.executable import RecordedHost, computed
from eventlm.system.system import real_system
from eventlm.types import ModelImpl
from eventlm.worker.protocol import (
    FAKE_MODEL,
    TORCH_BACKEND,
    FromWorker,
    StepPayload,
    StepResult,
    WorkerDesync,
    WorkerFailed,
    WorkerReady,
    WorkerSetup,
    backend_name,
    transformers_backend,
)

#: Fields of the header's host on which tokens may depend.
HOST_FIELDS = (
    *("python", "implementation", "platform", "cpu", "machine", "isa"),
    *("device", "dtype", "quantization", "attention_backend", "kernel_library", "torch", "transformers", "threads"),
    *("gpu", "gpu_capability", "cuda", "triton"),
)
#: The silence of a worker is waited for after the end of its step.
SPARE_SECONDS = 60
#: Parameters of the fake worker that only determine how long a step takes.
FAKE_TIMES = ("base_ns", "prefill_token_ns", "decode_ns", "context_token_ns")


class Workers(Protocol):
    """Runs the steps."""

    async def run(self, launched: Launched, body: bytes, payload: StepPayload) -> StepResult:
        """Run a step on the worker of its replica and epoch."""
        ...

    async def lose(self, replica: int) -> None:
        """The replica's worker was lost."""
        ...

    def host_differences(self) -> list[str]:
        """Differences between the recorded host and this one, a sentence each."""
        ...

    async def close(self) -> None:
        """Stop all workers."""
        ...


def worker_setup(
    header: Header, model: str, *, number: int = 0, threads: int | None = None, layout: Layout | None = None
) -> WorkerSetup:
    """A worker of a replicaset as in the run, except for its device, with the model in the folder `model` (or the fake
    one). It stands for all ranks of a replica.

    number: of the replicaset. layout: None: that of the run. Another number of stages gives the same bits, because each
    computes its layers as one process does. Other tensor ranks or KV groups do not: they add up other parts of a sum.

    Raises UsageError for `threads` or another layout of a run on GPUs, and for one whose tokens cannot be compared.
    """
    core, recorded = header.sets[number].core, computed(header, number)
    replica = header.sets_of_replicas().index(number)
    on_gpu = runs_on_gpu(header, number)
    recorded_layout = recorded_layouts(header)[replica]
    layout = _comparable(recorded_layout, layout)
    if on_gpu and layout != recorded_layout:
        raise UsageError(
            "a run on GPUs is computed again with the ranks that it had, since one worker computes with other kernels "
            "than ranks do; leave out --pipeline-parallel-size"
        )
    if layout.num_ranks > MAX_RANKS_OF_REPLICA:
        raise UsageError(
            f"a replica of the run had {layout.describe()}, which are {layout.num_ranks:,} ranks, and one has up to "
            f"{MAX_RANKS_OF_REPLICA:,}"
        )
    check_process_memory({model: layout.num_ranks}, "it can be executed on a host with more")
    if on_gpu and threads:
        raise UsageError(f"--threads {threads} is for runs on CPUs, and this one was computed on a GPU")
    fake: dict[str, Any] = {}
    if model == FAKE_MODEL:
        fake = recorded.model.fake | dict.fromkeys(FAKE_TIMES, 0)
    return WorkerSetup(
        replica=replica,
        epoch=1,
        model=model,
        tokenizer=recorded.host.tokenizer,
        dtype=recorded.host.dtype or recorded.model.dtype,
        quantization=recorded.model.quantization,
        model_impl=_model_impl(recorded.host),
        kv_cache_dtype=recorded.cache.kv_cache_dtype,
        block_size=core.block_size,
        num_blocks=core.num_blocks,
        state_slots=core.state_slots or 0,
        max_model_len=core.max_model_len,
        max_num_batched_tokens=core.max_num_batched_tokens,
        max_num_seqs=core.max_num_seqs,
        decode_batches=core.decode_batches,
        max_steps_in_flight=core.steps_in_flight,
        threads=threads or recorded.host.threads,
        cpu_kernels=_cpu_kernels(recorded.host),
        attention_backend=recorded.host.attention_backend if on_gpu else AUTO,
        batch_invariant=recorded.gpu.batch_invariant,
        torch_compile=recorded.gpu.torch_compile,
        graph_buckets=core.graph_buckets,
        warm_up=False,
        fake=fake,
        layout=layout,
        kv_shard_tokens=core.kv_shard_tokens or 0,
    )


def _comparable(recorded: Layout, given: Layout | None) -> Layout:
    if given is None:
        return recorded
    sizes = (
        ("--tensor-parallel-size", "tensor rank", recorded.tensor, given.tensor),
        ("--kv-parallel-size", "KV group", recorded.groups, given.groups),
    )
    for flag, noun, was, size in sizes:
        if size != was:
            raise UsageError(
                f"{flag} {size}: the run had {counted(was, noun)}, and the sums of {size} have other last bits, so its "
                "tokens cannot be compared; only --pipeline-parallel-size may be another"
            )
    return given


def runs_on_gpu(header: Header, number: int = 0) -> bool:
    """Whether GPUs computed the steps of a replicaset."""
    return computed(header, number).host.device.startswith("cuda")


def _cpu_kernels(host: RecordedHost) -> str:
    """The build that the run used, if this machine has it; else it is one of the host differences."""
    for build in available_builds():
        if host.attention_backend in (backend_name(build), *_transformers_backends(build)):
            return build
    return TORCH if host.attention_backend in (TORCH_BACKEND, transformers_backend("")) else AUTO


def _model_impl(host: RecordedHost) -> ModelImpl:
    is_known = any(host.attention_backend in _transformers_backends(build) for build in ("", *BUILDS))
    return "transformers" if is_known else "eventlm"


def _transformers_backends(build: str) -> list[str]:
    return [transformers_backend(build, attends=attends) for attends in (True, False)]


class WorkerProcesses:
    """Real worker processes, on this host. setups: of each replicaset what all its workers have in common, so all but
    replica, epoch, rank and device. devices: GPUs, which they take in turn, for replicasets that GPUs computed.

    Raises UsageError if the model is not the one that ran, or a GPU is missing. Every call may raise EventLMError if a
    worker fails.
    """

    def __init__(self, setups: Sequence[WorkerSetup], header: Header, devices: Sequence[Device] = ()) -> None:
        for number, setup in enumerate(setups):
            _check_model(setup, header, number)
            if runs_on_gpu(header, number) and not devices:
                gpu = computed(header, number).host.gpu
                raise UsageError(f"the run was computed on a GPU ({gpu}), and there is none to re-execute it on")
        sets = header.sets_of_replicas()
        #: By replica.
        self._setups = [structs.replace(setups[number], replica=replica) for replica, number in enumerate(sets)]
        self._devices = [(devices if runs_on_gpu(header, number) else ()) or [Device()] for number in sets]
        self._limits = [computed(header, number).worker for number in sets]
        self._header = header
        self._launcher = ProcessLauncher()
        self._workers: dict[int, _Ranks] = {}
        #: By replicaset, once one of its workers has started.
        self._hosts: dict[int, dict[str, Any]] = {}

    async def run(self, launched: Launched, body: bytes, payload: StepPayload) -> StepResult:
        """Send the step and wait for its result."""
        ranks = self._workers.get(launched.replica)
        if ranks is None or ranks.epoch != launched.epoch:
            await self.lose(launched.replica)
            ranks = await self._start(launched.replica, launched.epoch)
        found = await ranks.step(body, payload, self._limits[launched.replica].step_timeout_seconds)
        if isinstance(found, StepResult):
            return found
        what = f"step {launched.step} of replica {launched.replica} (event {launched.s})"
        if found.desynced >= 0:
            raise EventLMError(
                f"{ranks.name(found.rank)} rejects {what}: {found.reason}; `eventlm replay` verifies the trace"
            )
        raise EventLMError(f"{ranks.name(found.rank)} {found.reason} in {what}")

    async def _start(self, replica: int, epoch: int) -> _Ranks:
        setup, devices, limits = self._setups[replica], self._devices[replica], self._limits[replica]
        num_ranks = setup.layout.num_ranks
        setups = []
        for rank in range(num_ranks):
            device = devices[(replica * num_ranks + rank) % len(devices)]
            setups.append(structs.replace(setup, epoch=epoch, rank=rank, device=device.name, gpu=device.model))
        silence_seconds = limits.step_timeout_seconds + SPARE_SECONDS
        group = RankGroup(real_system(), setups, self._launcher, silence_seconds=silence_seconds)
        ranks = self._workers[replica] = _Ranks(group, epoch)
        await group.start()
        message, rank = await group.ready(limits.start_timeout_seconds)
        if isinstance(message, WorkerFailed) and message.exit_code:
            raise CheckpointError(message.message, exit_code=message.exit_code)
        if not isinstance(message, WorkerReady):
            late = f"sent no valid message in {limits.start_timeout_seconds} s"
            ending = _failed(message) if isinstance(message, WorkerFailed) else group.ending(rank) or late
            raise EngineUnavailableError(f"{ranks.name(rank)} {ending} while it started; see its last output above")
        self._hosts[self._header.sets_of_replicas()[replica]] = describe_host() | message.host
        return ranks

    async def lose(self, replica: int) -> None:
        """Kill the replica's worker, if it has one."""
        ranks = self._workers.pop(replica, None)
        if ranks is not None:
            await ranks.group.kill()

    def host_differences(self) -> list[str]:
        """By field of the header; empty before the first step."""
        found: dict[str, None] = {}
        for number, host in sorted(self._hosts.items()):
            record = self._header.sets[number]
            # What is the machine's is in the header once.
            machine = {name: self._header.host[name] for name in describe_host() if name in self._header.host}
            whole = _without_number(machine | record.host)
            recorded = {"eventlm": self._header.code_version} | whole
            here = {"eventlm": __version__} | _without_number(host)
            for name in ("eventlm", *HOST_FIELDS):
                if recorded.get(name) != here.get(name):
                    whose = f"{record.name}: " if number and name in record.host else ""
                    found[
                        f"{whose}{name}: recorded {recorded.get(name, 'nothing')}, here {here.get(name, 'nothing')}"
                    ] = None
        return list(found)

    async def close(self) -> None:
        """Stop all workers."""
        for replica in list(self._workers):
            await self._workers.pop(replica).group.stop()


def _check_model(setup: WorkerSetup, header: Header, number: int) -> None:
    """Raise UsageError for a model that is not the one that ran."""
    recorded = header.sets[number]
    fingerprint = FAKE_MODEL if setup.model == FAKE_MODEL else model_fingerprint(setup.model)
    if fingerprint != recorded.model_fingerprint:
        flag = f"--replicaset {recorded.name}:model=FOLDER" if header.replicasets else "--model"
        raise UsageError(
            f"the model {setup.model} is not the one that ran: its fingerprint is {fingerprint}, the trace has "
            f"{recorded.model_fingerprint or 'none'}; give the folder of that model with {flag}"
        )


def _without_number(host: dict[str, Any]) -> dict[str, Any]:
    """Without the number of the GPU, which does not matter."""
    return host | {"device": host["device"].partition(":")[0]} if "device" in host else host


class _Ranks:
    """The worker processes of a replica, of an epoch."""

    def __init__(self, group: RankGroup, epoch: int) -> None:
        self.group = group
        self.epoch = epoch

    def name(self, rank: int) -> str:
        """A rank as the subject of a sentence."""
        layout: Layout = self.group.layout
        return layout.name_of(max(rank, 0)) if layout.num_ranks > 1 else "the worker"

    async def step(self, body: bytes, payload: StepPayload, timeout_seconds: float) -> StepResult | Loss:
        """Run a step; how a rank was lost by it, if one was."""
        results: list[StepResult] = []
        answered = asyncio.Event()

        def take(rank: int, message: FromWorker) -> Loss | None:
            if isinstance(message, StepResult):
                results.append(message)
                answered.set()
            elif isinstance(message, WorkerDesync):
                return Loss(message.detail, desynced=message.step)
            elif isinstance(message, WorkerFailed):
                return Loss(_failed(message), noticed=GRACE_SECONDS if message.lost_peer else 0.0)
            return None

        self.group.send_step(body, payload)
        listening = asyncio.create_task(self.group.listen(take))
        waiting = asyncio.create_task(answered.wait())
        try:
            both: set[asyncio.Task[Any]] = {listening, waiting}
            await asyncio.wait(both, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
            if results:
                self.group.note_result(results[0])
                return results[0]
            if listening.done():
                return listening.result()
            return Loss(f"sent no valid message in {timeout_seconds} s", rank=self.group.layout.answering_rank)
        finally:
            for task in (listening, waiting):
                task.cancel()
            await asyncio.gather(listening, waiting, return_exceptions=True)


def _failed(message: WorkerFailed) -> str:
    return f"failed: {message.message}"
