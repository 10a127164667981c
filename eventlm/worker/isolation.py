"""Whether a model that transformers computes keeps the sequences of a step apart.

The tokens of a step are one row to it. Attention is ours and knows which are whose; whatever else looks at more than
one token, or counts positions by itself, would take one sequence's for another's.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eventlm.sampling_params import SamplingParams
from eventlm.types import ceil_div
from eventlm.worker.protocol import NewSequence
from eventlm.worker.sequence_table import Row, WorkerSequence

#: Of a sequence, whose last token is computed in a step of its own.
_NUM_TOKENS = 5
#: Rounding may send a token to other experts, not each time.
_MOST_TRIALS = 3
#: How far a token's hidden states may be from those that it has alone, as a share of them. What is mixed is not near.
_TOLERANCE = {torch.float32: 0.01, torch.float16: 0.2, torch.bfloat16: 0.2}


def keeps_apart(run: Callable[[Sequence[Row]], Tensor], *, vocab_size: int, block_size: int, num_blocks: int) -> bool:
    """Whether two sequences have the same hidden states together, in one step after the other, as each has alone.

    run: gives those of the tokens of a step, [T, H], and uses the first blocks of the KV cache. True if there are not
    enough for two sequences, which then are never together.
    """
    per_sequence = ceil_div(_NUM_TOKENS, block_size)
    if num_blocks < 2 * per_sequence:
        return True
    return any(_is_same(run, vocab_size, per_sequence, trial) for trial in range(_MOST_TRIALS))


def num_blocks_written(block_size: int) -> int:
    """Blocks that `keeps_apart` leaves something in."""
    return 2 * ceil_div(_NUM_TOKENS, block_size)


def _is_same(run: Callable[[Sequence[Row]], Tensor], vocab_size: int, per_sequence: int, trial: int) -> bool:
    generator = torch.Generator().manual_seed(trial)
    sequences = []
    for number in range(2):
        token_ids = torch.randint(vocab_size, (_NUM_TOKENS,), generator=generator).tolist()
        new = NewSequence(
            request=-1, index=number, token_ids=token_ids, num_prompt_tokens=_NUM_TOKENS, params=SamplingParams()
        )
        sequence = WorkerSequence(new)
        sequence.block_table = array("i", range(number * per_sequence, (number + 1) * per_sequence))
        sequences.append(sequence)
    first = run([Row(each, 0, _NUM_TOKENS - 1, False) for each in sequences])
    last = run([Row(each, _NUM_TOKENS - 1, 1, False) for each in sequences])
    for number, sequence in enumerate(sequences):
        own = first.view(2, _NUM_TOKENS - 1, -1)[number]
        together_TH = torch.cat((own, last[number : number + 1]))
        alone_TH = run([Row(sequence, 0, _NUM_TOKENS, False)])
        difference = (together_TH - alone_TH).float().norm(dim=-1)
        if bool((difference > _TOLERANCE[alone_TH.dtype] * alone_TH.float().norm(dim=-1)).any()):
            return False
    return True
