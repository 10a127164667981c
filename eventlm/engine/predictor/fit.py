"""Fits the predictor's coefficients to measured steps: least squares without negative coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from eventlm.core.predictor import DEFAULT_COEFFICIENTS, NUM_COEFFICIENTS, Predictor
from eventlm.worker.protocol import StepSample


def fit(samples: Sequence[StepSample]) -> list[int]:
    """Coefficients in picoseconds; with too few samples to separate them, the defaults scaled to the samples.

    A step that took no measurable time, as a fake worker's may, counts as one nanosecond. Errors count relative to the
    duration, so that short steps matter as much as long ones. A coefficient that comes out negative is set to zero and
    the rest are fitted again.
    """
    if len(samples) < NUM_COEFFICIENTS:
        return _scaled_defaults(samples)
    import numpy as np  # Not at the top, because importing it is slow and most commands fit nothing.

    features = np.array(
        [
            [1, shape.prefill_tokens, shape.num_decodes, shape.context_tokens, shape.chunk_context]
            for shape in (sample.shape for sample in samples)
        ],
        dtype=float,
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
    for index, value in zip(kept, found / scale[kept], strict=True):
        coefficients[index] = max(round(float(value)), 0)
    return coefficients if any(coefficients) else list(DEFAULT_COEFFICIENTS)


def _scaled_defaults(samples: Sequence[StepSample]) -> list[int]:
    """The defaults, scaled by the median ratio of a sample's duration to their prediction."""
    if not samples:
        return list(DEFAULT_COEFFICIENTS)
    predictor = Predictor.from_coefficients(DEFAULT_COEFFICIENTS)
    ratio = median(1000 * max(sample.duration_ns, 1) / predictor.step_ps(sample.shape) for sample in samples)
    return [round(coefficient * ratio) for coefficient in DEFAULT_COEFFICIENTS]
