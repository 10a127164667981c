"""The predictor that policies in a simulation get: fitted to the cost model as a live engine's is to its worker."""

from __future__ import annotations

from eventlm.control.predictor_fit import fit
from eventlm.replay.cost_model import CostModel, LinearCost, StepShape
from eventlm.worker.protocol import FAKE_MODEL, WorkerSetup
from eventlm.worker.warm_up import fitting_shapes, sample_of

_BLOCK_SIZE = 16
#: Longer than all that a warm-up computes.
_MAX_MODEL_LEN = 1 << 16


def predictor_for(model: CostModel, *, max_num_batched_tokens: int, max_num_seqs: int) -> list[int]:
    """Coefficients of `eventlm.core.predictor`: what a warm-up would have found on a worker of these costs."""
    worker = WorkerSetup(
        replica=0,
        epoch=0,
        model=FAKE_MODEL,
        block_size=_BLOCK_SIZE,
        num_blocks=_MAX_MODEL_LEN // _BLOCK_SIZE,
        max_model_len=_MAX_MODEL_LEN,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )
    if isinstance(model, LinearCost):
        model = model.without_noise()
    samples = []
    for step, warm_up_shape in enumerate(fitting_shapes(worker)):
        features = sample_of(warm_up_shape, 0)
        shape = StepShape(
            prefill_tokens=features.prefill_tokens,
            num_decodes=features.num_decodes,
            context_tokens=features.context_tokens,
            chunk_context=features.chunk_context,
            num_chunks=0 if features.num_decodes else warm_up_shape.num_rows,
        )
        samples.append(sample_of(warm_up_shape, model.step_ns(shape, 0, step)))
    return fit(samples)
