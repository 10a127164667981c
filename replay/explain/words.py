"""Phases, causes and times of explanations in a few words."""

from __future__ import annotations

from collections.abc import Sequence

from eventlm.replay.explain.result import Cause, Phase
from eventlm.types import NANOSECONDS_PER_MILLISECOND

PHASES: dict[Phase, str] = {
    "edge": "edge",
    "queue": "waiting",
    "prefill": "prompt",
    "decode": "decoding",
    "preempted": "preempted",
    "retry": "retry",
    "recompute": "recomputing",
    "text_end": "ending",
    "unseen": "unseen",
}
CAUSES: dict[Cause, str] = {
    "steps_in_flight": "steps in flight",
    "batcher": "no chunk",
    "token_budget": "token budget",
    "micro_batch": "share of a step",
    "head_of_line": "head of the line",
    "trial": "a trial alone",
    "blocks": "blocks",
    "sequence_limit": "sequence limit",
    "avoided": "failed there",
    "backend_limit": "backends full",
    "worker": "no worker",
    "backend": "no backend",
    "backoff": "backoff",
    "paused": "paused",
    "draining": "rows in flight",
    "grammar": "grammar",
    "text_end": "text end",
    "receiving": "receiving",
    "tokenizing": "tokenizing",
    "stamping": "stamping",
    "step": "computing",
    "stage_wait": "waiting for a stage",
    "exchange": "exchange",
    "other_step": "worker busy",
    "dispatch": "dispatch",
    "return": "result",
    "lost_step": "worker lost",
    "engine_down": "engine down",
    "cut_step": "cut short",
    "first_token": "first token there",
    "streaming": "streaming",
    "failed_attempt": "failed attempt",
    "outrun": "outrun",
    "cut_attempt": "cut short there",
    "not_recorded": "not recorded",
}


def label(phase: Phase, cause: Cause) -> str:
    """A part in a few words: `waiting: blocks`."""
    return f"{PHASES[phase]}: {CAUSES[cause]}"


def milliseconds(ns: int) -> str:
    """With three digits or a tenth: `1,942.3 ms`, `2.13 ms`, `0.042 ms`."""
    value = ns / NANOSECONDS_PER_MILLISECOND
    return f"{value:,.{1 if value >= 9.995 else 2 if value >= 0.9995 else 3}f} ms"


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
