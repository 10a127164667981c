"""The predictor that policies in a simulation get: fitted to the cost model as a live engine's is to its worker.

A warm-up has two seconds and leaves long prompts to extrapolation; on a GPU, where attention begins to count at tens of
thousands of tokens, that is too long by factors. A cost model can be asked for long contexts at no price, and is.
"""

from __future__ import annotations

from eventlm.engine.predictor.fit import fit
from eventlm.replay.cost.model import CostModel, LinearCost, StepShape
from eventlm.worker.protocol import FAKE_MODEL, WorkerSetup
from eventlm.worker.warm_up import Shape, fitting_shapes, sample_of

_BLOCK_SIZE = 16
#: No context of the shapes below is longer.
_MAX_MODEL_LEN = 1 << 18
#: Beside those of a warm-up: contexts of chunks of long prompts, and of decodes.
_CHUNK_CONTEXTS = (4096, 16_384, 32_768, 65_536, 131_072)
_DECODE_CONTEXTS = (4096, 16_384)
_LONG_CHUNK_TOKENS = 2048


def predictor_for(model: CostModel, *, max_num_batched_tokens: int, max_num_seqs: int) -> list[int]:
    """Coefficients of `eventlm.core.predictor` for a worker of these costs within these limits."""
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
    chunk_tokens = min(_LONG_CHUNK_TOKENS, max_num_batched_tokens)
    long_shapes = [Shape(1, chunk_tokens, context) for context in _CHUNK_CONTEXTS]
    long_shapes += [Shape(8, 1, context) for context in _DECODE_CONTEXTS]
    samples = []
    for step, warm_up_shape in enumerate([*fitting_shapes(worker), *fitting_shapes(worker, long_shapes)]):
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
