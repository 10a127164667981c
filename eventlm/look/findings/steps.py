"""Findings about what steps hold: stalls, preemption thrash, and predictions that are off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from eventlm.formatting import counted
from eventlm.look.findings.finding import Finding, RunColumns
from eventlm.look.words import percent, seconds
from eventlm.replay.index.tables import MarkKind
from eventlm.types import NANOSECONDS_PER_SECOND

#: Steps without a chunk although a prompt was half done and half the token budget was free, of the time of all steps.
_STALLED_PPM = 100_000
_MIN_STALLED_NS = NANOSECONDS_PER_SECOND // 2
#: Preemptions for memory or admission; with so many for each sequence, or such a share of prompt tokens computed again.
_MIN_PREEMPTIONS = 20
_PREEMPTIONS_PPM = 400_000
_RECOMPUTED_PPM = 80_000
#: How far predicted times are from the measured, in the middle.
_MIN_STEPS = 50
_OFF_PPM = 400_000
_MAX_NAMED = 20
_PPM = 1_000_000


def find_stalls(run: RunColumns) -> Iterator[Finding]:
    """Prompts that are half done get no tokens although the steps have room and blocks are free."""
    index, steps = run.index, run.index.steps
    if not len(steps):
        return
    drains = np.searchsorted(index.drains["ts"], steps["launched_ns"], side="right") - 1
    is_stalled = (steps["done_s"] >= 0) & (steps["chunks"] == 0) & (steps["launched_ns"] >= 0) & (drains >= 0)
    is_stalled &= steps["tokens"] * 2 <= run.config.max_num_batched_tokens
    for replica in run.replicas:
        of_replica = steps["replica"] == replica
        partial = run.gauge("partial", replica)[np.maximum(drains, 0)]
        is_stalled &= ~of_replica | (partial > 0)
    stalled_ns = int(run.step_ns[is_stalled].sum())
    share = run.share_ppm(stalled_ns, int(run.step_ns.sum()))
    if share < _STALLED_PPM or stalled_ns < _MIN_STALLED_NS:
        return
    first = int(np.flatnonzero(is_stalled)[0])
    slow = _slow_prefills(run)
    yield Finding(
        kind="stall_with_free_blocks",
        title="Prompts wait half done in steps that have room for them",
        text=f"{int(is_stalled.sum()):,} steps, {percent(share)} of step time ({seconds(stalled_ns)}), had no "
        "chunk of a prompt although one was half done, its blocks were there, and more than half of the step's token "
        f"budget ({run.config.max_num_batched_tokens:,}) was free. The batcher gave none.",
        culprit=run.plugin("batcher"),
        impact_ppm=share,
        figures={"num_steps": int(is_stalled.sum()), "stalled_ns": stalled_ns, "stalled_share_ppm": share},
        requests=slow,
        s=int(steps["launch_s"][first]),
        ts=int(steps["launched_ns"][first]),
        command="show plan",
    )


def _slow_prefills(run: RunColumns) -> list[tuple[int, int]]:
    """The sequences whose prompts took longest from admission to the first token."""
    requests = run.index.requests
    rows = np.flatnonzero(run.launched & (requests["first_token_ns"] >= 0))
    took = requests["first_token_ns"][rows] - requests["launched_ns"][rows]
    return run.identities(rows[np.argsort(-took, kind="stable")][:_MAX_NAMED])


def find_thrash(run: RunColumns) -> Iterator[Finding]:
    """Work is thrown away and done again."""
    index, marks = run.index, run.index.marks
    is_preempted = marks["kind"] == MarkKind.PREEMPTED
    reasons = Counter(index.name(text) for text in marks["text"][is_preempted].tolist())
    num_lost = reasons.pop("lost", 0)
    num_preempted = reasons.total()
    if num_preempted < _MIN_PREEMPTIONS:
        return
    stretches, requests = index.stretches, index.requests
    chunks = stretches["is_chunk"] == 1
    computed = np.bincount(
        stretches["row"][chunks], weights=stretches["tokens"][chunks], minlength=len(requests)
    ).astype(np.int64)
    again = np.maximum(computed - np.maximum(requests["prompt_tokens"] - requests["cached_tokens"], 0), 0)
    again[requests["preemptions"] == 0] = 0
    share = run.share_ppm(int(again.sum()), int(computed.sum()))
    if share < _RECOMPUTED_PPM and run.share_ppm(num_preempted, len(requests)) < _PREEMPTIONS_PPM:
        return
    reason = reasons.most_common(1)[0][0]
    rows = np.argsort(-requests["preemptions"], kind="stable")[:_MAX_NAMED]
    first = int(np.flatnonzero(is_preempted)[0])
    most = int(requests["preemptions"].max())
    culprit = run.plugin("policy") if reason == "admission" else f"num_blocks {run.config.num_blocks:,}"
    how = (
        "The policy evicts residents for the head of the line, which are admitted again soon after"
        if reason == "admission"
        else "Growing sequences run out of KV blocks, so others have to give theirs up"
    )
    yield Finding(
        kind="preemption_thrash",
        title=f"{counted(num_preempted, 'preemption')}: work is thrown away and done again",
        text=f"{percent(share)} of all prompt tokens were computed again ({int(again.sum()):,}); one sequence was "
        f"preempted {most:,} times. {how}."
        + (f" {counted(num_lost, 'preemption')} more followed from lost workers." if num_lost else ""),
        culprit=culprit,
        impact_ppm=share,
        figures={"num_preemptions": num_preempted, "recomputed_tokens": int(again.sum()), "recomputed_ppm": share},
        requests=run.identities(rows),
        s=int(marks["s"][first]),
        ts=int(marks["ts"][first]),
        # Both keys are in the plan of the first preemption.
        command="show plan",
    )


def find_predictor_off(run: RunColumns) -> Iterator[Finding]:
    """Plans are made with wrong times."""
    steps = run.index.steps
    known = (steps["done_s"] >= 0) & (run.step_ns > 0) & (steps["predicted_ns"] > 0)
    if int(known.sum()) < _MIN_STEPS:
        return
    predicted, took = steps["predicted_ns"][known], run.step_ns[known]
    off = np.abs(predicted - took) * _PPM // np.maximum(took, 1)
    middle = int(np.median(off))
    if middle < _OFF_PPM:
        return
    direction = "too short" if int(np.median(predicted - took)) < 0 else "too long"
    rows = np.flatnonzero(known)
    worst = int(rows[int(off.argmax())])
    yield Finding(
        kind="predictor_off",
        title=f"Predicted times of steps are {direction}: their median error is {percent(middle)}",
        text=f"The median step is predicted to take {seconds(int(np.median(predicted)))} and takes "
        f"{seconds(int(np.median(took)))}. Deadlines, slack and chunk sizes that go by these times are wrong. Measure "
        "the machine anew: start without the cached coefficients, or give --predictor.",
        culprit="predictor",
        impact_ppm=min(middle, _PPM),
        figures={"median_error_ppm": middle, "p90_error_ppm": int(np.quantile(off, 0.9))},
        s=int(steps["launch_s"][worst]),
        ts=int(steps["launched_ns"][worst]),
    )
