"""Whether the ranks of a replica, which may be on several hosts, have the same code, model and kernels."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from eventlm.engine.request import EngineUnavailableError
from eventlm.errors import CheckpointError
from eventlm.worker.protocol import WorkerReady

#: What tokens may depend on, of a worker's host.
SAME_FACTS = (
    *("torch", "transformers", "triton", "cuda", "machine", "isa", "gpu", "gpu_capability"),
    *("dtype", "quantization", "attention_backend", "kernel_library", "tokenizer"),
)


def agreed(reports: Sequence[WorkerReady], hosts: Sequence[str], answering: int) -> WorkerReady:
    """The report of all ranks: that of the answering one, with the fewest blocks of any, the notes of all, and how long
    each measured step took the slowest.

    hosts: where each of them runs; empty: here. Raises CheckpointError where they have different models, and
    EngineUnavailableError where their hosts differ in what tokens depend on.
    """
    _check("version of eventlm", [report.version for report in reports], hosts)
    fingerprints = [report.model_fingerprint for report in reports]
    if (pair := _different(fingerprints)) is not None:
        raise CheckpointError(_disagreement("checkpoint, by its fingerprint", fingerprints, pair, hosts))
    for fact in SAME_FACTS:
        _check(fact, [str(report.host.get(fact, "none")) for report in reports], hosts)
    notes = list(dict.fromkeys(note for report in reports for note in report.notes))
    num_blocks = min(report.num_blocks for report in reports)
    # A step takes a pipeline as long as its slowest stage, and all ranks have measured the same steps.
    samples = [
        max(same, key=lambda sample: sample.duration_ns)
        for same in zip(*(report.samples for report in reports), strict=True)
    ]
    return structs.replace(reports[answering], num_blocks=num_blocks, notes=notes, samples=samples)


def _check(what: str, values: Sequence[str], hosts: Sequence[str]) -> None:
    if (pair := _different(values)) is not None:
        raise EngineUnavailableError(_disagreement(what, values, pair, hosts))


def _different(values: Sequence[str]) -> tuple[int, int] | None:
    """The first two ranks that differ."""
    return next(((0, rank) for rank, value in enumerate(values) if value != values[0]), None)


def _disagreement(what: str, values: Sequence[str], pair: tuple[int, int], hosts: Sequence[str]) -> str:
    said = " and ".join(f"rank {rank}{_on(hosts[rank])} has {values[rank]}" for rank in pair)
    return f"the ranks of a replica must have the same {what}, but {said}"


def _on(host: str) -> str:
    return f" on {host}" if host else ""
