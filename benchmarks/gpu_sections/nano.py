"""nano-vLLM's workload on the shape of Qwen3-0.6B through the offline API, recorded, beside its roofline and a peer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_harness import transformers_peer
from benchmarks.gpu_harness.checkpoints import qwen
from benchmarks.gpu_harness.engines import Run, Workload, generate, nano_workload, start, warm_up
from benchmarks.gpu_harness.roofline import floor_seconds, read_steps
from benchmarks.gpu_harness.row import Context, Parts, Row, speed
from eventlm.bench.step.machine_probe import Machine
from eventlm.models.config import read_model

TARGET, PEER_TARGET = 0.75, 5.0
MAX_MODEL_LEN = 4096
#: The peer gets so many of the sequences, with outputs so many times shorter: its time grows with the square of the
#: first, and it takes a step for each token of the longest.
PEER_SEQS, PEER_CUT = 64, 4


def parts(context: Context) -> Parts:
    """Both on one engine: a start takes longer than a run."""
    return {"Qwen3-0.6B": lambda: _measure(context)}


def _measure(context: Context) -> Iterator[Row]:
    workload = nano_workload(context)
    some = workload.first(PEER_SEQS)
    # Backwards, so that nothing of it is in the prefix cache.
    cut = Workload([prompt[::-1] for prompt in some.prompts], [-(-length // PEER_CUT) for length in some.output_lens])
    row, own = offline(context, "0.6B", [workload, cut], target=TARGET)
    yield row
    peer = transformers_peer.generate(context, qwen(context, "0.6B"), cut)
    note = f"transformers: {peer.num_tokens:,} tokens in {peer.seconds:.1f} s; here in {own.seconds:.2f} s"
    yield speed(
        f"{len(cut.prompts)} of them, outputs of a {PEER_CUT}th",
        own.rate,
        "tok/s",
        limit=peer.rate,
        limit_name="generate_batch",
        target=PEER_TARGET,
        note=note,
    )


def offline(context: Context, size: str, workloads: list[Workload], *, target: float) -> tuple[Row, Run]:
    """Output tokens a second of the first workload beside the roofline of the run's own steps, and the last run."""
    model, workload = qwen(context, size), workloads[0]
    options = {} if context.smoke else {"max_model_len": MAX_MODEL_LEN}
    with start(context, model, record=Path(context.folder) / "runs", **options) as llm:
        num_before = warm_up(llm, workload)
        runs = [generate(llm, each) for each in workloads]
        folder = llm.run_folder
    assert folder is not None
    steps = read_steps(folder, num_before=num_before, num_requests=len(workload.prompts))
    ceilings = context.ceilings
    machine = Machine(bytes_per_second=ceilings.bytes_per_second, flops_per_second=ceilings.flops_per_second)
    run, least = runs[0], floor_seconds(read_model(model), steps, machine)
    on_device = sum(step.end_ns - step.start_ns for step in steps) / 1e9
    row = speed(
        f"Qwen3-{size}, {len(workload.prompts)} sequences, offline",
        run.rate,
        "tok/s",
        limit=run.num_tokens / least,
        limit_name="roofline",
        target=target,
        note=f"{run.num_tokens:,} tokens in {run.seconds:.2f} s, {len(steps):,} steps of {on_device:.2f} s in all",
    )
    return row, runs[-1]
