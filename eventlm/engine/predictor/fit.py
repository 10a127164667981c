"""Fits the predictor's coefficients to measured steps: least squares without negative coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from eventlm.core.predictor import DEFAULT_COEFFICIENTS, NUM_COEFFICIENTS, Predictor
from eventlm.worker.protocol import StepSample


def fit(samples: Sequence[StepSample]) -> list[int]:
    """Coefficients in picoseconds; with too few samples to tell them apart the defaults, made as fast as the samples.

    A step that took no time that the clock can tell, as those of a fake worker may, counts as one of a nanosecond.
    Errors count relative to the duration, so that short steps matter as much as long ones. A coefficient that comes
    out negative is set to zero and the rest fitted again.
    """
    if len(samples) < NUM_COEFFICIENTS:
        return _scaled_defaults(samples)
    import numpy as np  # not at the top: commands that fit nothing need not wait for it

    features = np.array(
        [[1, s.prefill_tokens, s.num_decodes, s.context_tokens, s.chunk_context] for s in samples], dtype=float
    )
    durations = np.array([max(s.duration_ns, 1) for s in samples], dtype=float) * 1000
    rows = features / durations[:, None]
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    kept = list(range(NUM_COEFFICIENTS))
    while True:
        found, *_ = np.linalg.lstsq(rows[:, kept] / scale[kept], np.ones(len(samples)), rcond=None)
        if (found >= 0).all():
            break
        del kept[int(found.argmin())]
    coefficients = [0] * NUM_COEFFICIENTS
    for place, value in zip(kept, found / scale[kept], strict=True):
        coefficients[place] = max(round(float(value)), 0)
    return coefficients if any(coefficients) else list(DEFAULT_COEFFICIENTS)


def _scaled_defaults(samples: Sequence[StepSample]) -> list[int]:
    """The defaults, times how much longer than predicted by them the median sample took."""
    if not samples:
        return list(DEFAULT_COEFFICIENTS)
    predictor = Predictor.from_coefficients(DEFAULT_COEFFICIENTS)
    ratio = median(
        max(s.duration_ns, 1)
        / predictor.step_ns(
            prefill_tokens=s.prefill_tokens,
            num_decodes=s.num_decodes,
            context_tokens=s.context_tokens,
            chunk_context=s.chunk_context,
        )
        for s in samples
    )
    return [round(coefficient * ratio) for coefficient in DEFAULT_COEFFICIENTS]
