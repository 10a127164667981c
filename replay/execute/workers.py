"""Worker processes of a re-execution: one for each replica and worker epoch, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import structs

from eventlm._version import __version__
from eventlm.engine.replicas.worker_process import WorkerProcess
from eventlm.engine.request import EngineUnavailableError
from eventlm.engine.setup import Device, describe_host
from eventlm.errors import CheckpointError, EventLMError, UsageError
from eventlm.events import Header, Launched
from eventlm.kernels.cpu.native import BUILDS, available_builds
from eventlm.models.config import model_fingerprint
from eventlm.models.cpu_kernels import AUTO, TORCH
from eventlm.replay.execute.executable import RecordedHost, computed
from eventlm.replay.rebuild import check_one_set
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


def worker_setup(header: Header, model: str, *, threads: int | None = None) -> WorkerSetup:
    """A worker as in the run, except for its device, with the model in the folder `model` (or the fake one).

    Raises UsageError for `threads` of a run that was computed on GPUs.
    """
    check_one_set(header, header.run, "--execute")
    core, recorded = header.core, computed(header)
    on_gpu = runs_on_gpu(header)
    if on_gpu and threads:
        raise UsageError(f"--threads {threads} is for runs on CPUs, and this one was computed on a GPU")
    fake: dict[str, Any] = {}
    if model == FAKE_MODEL:
        fake = recorded.model.fake | dict.fromkeys(FAKE_TIMES, 0)
    return WorkerSetup(
        replica=0,
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
        max_steps_in_flight=core.steps_in_flight,
        threads=threads or recorded.host.threads,
        cpu_kernels=_cpu_kernels(recorded.host),
        attention_backend=recorded.host.attention_backend if on_gpu else AUTO,
        batch_invariant=recorded.gpu.batch_invariant,
        torch_compile=recorded.gpu.torch_compile,
        graph_buckets=core.graph_buckets,
        warm_up=False,
        fake=fake,
    )


def runs_on_gpu(header: Header) -> bool:
    """Whether GPUs computed the run."""
    return computed(header).host.device.startswith("cuda")


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
    """Real worker processes. setup: common to all, except for replica, epoch and device. devices: GPUs, which replicas
    take in turn, for a run that was computed on GPUs.

    Raises UsageError if the model is not the one that ran, or a GPU is missing. Every call may raise EventLMError if a
    worker fails.
    """

    def __init__(self, setup: WorkerSetup, header: Header, devices: Sequence[Device] = ()) -> None:
        fingerprint = FAKE_MODEL if setup.model == FAKE_MODEL else model_fingerprint(setup.model)
        if fingerprint != header.model_fingerprint:
            raise UsageError(
                f"the model {setup.model} is not the one that ran: its fingerprint is {fingerprint}, the trace has "
                f"{header.model_fingerprint or 'none'}; give the folder of that model with --model"
            )
        if runs_on_gpu(header) and not devices:
            raise UsageError(
                f"the run was computed on a GPU ({computed(header).host.gpu}), and there is none to re-execute it on"
            )
        self._setup = setup
        self._devices = devices or [Device()]
        self._header = header
        worker = computed(header).worker
        self._start_seconds = worker.start_timeout_seconds
        self._step_seconds = worker.step_timeout_seconds
        self._workers: dict[int, WorkerProcess] = {}
        self._host: dict[str, Any] = {}

    async def run(self, launched: Launched, body: bytes, payload: StepPayload) -> StepResult:
        """Send the step and wait for its result."""
        worker = self._workers.get(launched.replica)
        if worker is None or worker.setup.epoch != launched.epoch:
            await self.lose(launched.replica)
            worker = await self._start(launched.replica, launched.epoch)
        worker.send_step(body, payload)
        message = await worker.answer(self._step_seconds)
        if isinstance(message, StepResult):
            return message
        what = f"step {launched.step} of replica {launched.replica} (event {launched.s})"
        if isinstance(message, WorkerDesync):
            raise EventLMError(f"the worker rejects {what}: {message.detail}; `eventlm replay` verifies the trace")
        raise EventLMError(f"the worker {_ending(worker, message, self._step_seconds)} in {what}")

    async def _start(self, replica: int, epoch: int) -> WorkerProcess:
        device = self._devices[replica % len(self._devices)]
        worker = WorkerProcess(
            real_system(),
            structs.replace(self._setup, replica=replica, epoch=epoch, device=device.name, gpu=device.model),
        )
        self._workers[replica] = worker
        await worker.start()
        message = await worker.answer(self._start_seconds)
        if isinstance(message, WorkerFailed) and message.exit_code:
            raise CheckpointError(message.message, exit_code=message.exit_code)
        if not isinstance(message, WorkerReady):
            ending = _ending(worker, message, self._start_seconds)
            raise EngineUnavailableError(f"the worker {ending} while it started; see its last output above")
        self._host = describe_host() | message.host
        return worker

    async def lose(self, replica: int) -> None:
        """Kill the replica's worker, if it has one."""
        worker = self._workers.pop(replica, None)
        if worker is not None:
            await worker.kill()

    def host_differences(self) -> list[str]:
        """By field of the header; empty before the first step."""
        if not self._host:
            return []
        recorded = {"eventlm": self._header.code_version} | _without_number(self._header.host)
        here = {"eventlm": __version__} | _without_number(self._host)
        return [
            f"{name}: recorded {recorded.get(name, 'nothing')}, here {here.get(name, 'nothing')}"
            for name in ("eventlm", *HOST_FIELDS)
            if recorded.get(name) != here.get(name)
        ]

    async def close(self) -> None:
        """Stop all workers."""
        for replica in list(self._workers):
            await self._workers.pop(replica).stop()


def _without_number(host: dict[str, Any]) -> dict[str, Any]:
    """Without the number of the GPU, which does not matter."""
    return host | {"device": host["device"].partition(":")[0]} if "device" in host else host


def _ending(worker: WorkerProcess, message: FromWorker | None, timeout_seconds: float) -> str:
    if isinstance(message, WorkerFailed):
        return f"failed: {message.message}"
    return worker.ending or f"sent no valid message in {timeout_seconds} s"
