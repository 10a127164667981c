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
#: How far hidden states may be from others, as a share of them: at most, if each operation may have rounded otherwise.
_MOST = {torch.float32: 0.01, torch.float16: 0.2, torch.bfloat16: 0.2}
#: With other neighbors, where nothing rounds otherwise but products of other numbers of rows: this, and as many times
#: what such products are seen to make.
_FLOOR = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.01}
_NOISE_MULTIPLE = 3

_Run = Callable[[Sequence[Row]], Tensor]


def keeps_apart(run: _Run, *, vocab_size: int, block_size: int, num_blocks: int) -> bool:
    """Whether sequences have the same hidden states whatever is computed beside them, and those they have alone.

    run: gives those of the tokens of a step, [T, H], and uses the first blocks of the KV cache. True if there are not
    enough for two sequences, which then are never together.
    """
    if num_blocks < 2:
        return True
    pairs = _Pairs(run, block_size, num_blocks)
    return any(_is_same(pairs, vocab_size, trial) for trial in range(_MOST_TRIALS))


def num_blocks_written(block_size: int, num_blocks: int) -> int:
    """Blocks that `keeps_apart` leaves something in."""
    return 2 * _blocks_of_a_sequence(block_size, num_blocks) if num_blocks > 1 else 0


def _blocks_of_a_sequence(block_size: int, num_blocks: int) -> int:
    return min(ceil_div(_NUM_TOKENS, block_size), num_blocks // 2)


class _Pairs:
    """Runs one or two sequences."""

    def __init__(self, run: _Run, block_size: int, num_blocks: int) -> None:
        self._run = run
        self._num_blocks = _blocks_of_a_sequence(block_size, num_blocks)
        self.num_tokens = min(_NUM_TOKENS, self._num_blocks * block_size)

    def in_two_steps(self, *all_ids: list[int]) -> list[Tensor]:
        """The hidden states of each of them, [T, H]: of all tokens but the last, then of that one."""
        sequences = [self._sequence(place, ids) for place, ids in enumerate(all_ids)]
        steps = [(0, self.num_tokens - 1), (self.num_tokens - 1, 1)]
        parts = [
            self._run([Row(each, start, count, False) for each in sequences]).chunk(len(sequences))
            for start, count in steps
            if count
        ]
        return [torch.cat(own) for own in zip(*parts, strict=True)]

    def alone(self, ids: list[int]) -> Tensor:
        """In one step."""
        return self._run([Row(self._sequence(0, ids), 0, self.num_tokens, False)])

    def _sequence(self, place: int, ids: list[int]) -> WorkerSequence:
        new = NewSequence(
            request=-1, index=place, token_ids=ids, num_prompt_tokens=self.num_tokens, params=SamplingParams()
        )
        sequence = WorkerSequence(new)
        sequence.block_table = array("i", range(place * self._num_blocks, (place + 1) * self._num_blocks))
        return sequence


def _is_same(pairs: _Pairs, vocab_size: int, trial: int) -> bool:
    generator = torch.Generator().manual_seed(trial)
    a, b, c = torch.randint(vocab_size, (3, pairs.num_tokens), generator=generator).tolist()
    first, second = pairs.in_two_steps(a, b)
    dtype = first.dtype
    # What a sequence and its copy mix is mostly what it has alone. But there are more rows, also of each expert.
    noise = _distance(pairs.in_two_steps(a, a)[0], pairs.in_two_steps(a)[0])
    limit = min(_FLOOR[dtype] + _NOISE_MULTIPLE * noise, _MOST[dtype])
    # Steps of the same shapes: most models compute the same bits.
    return (
        _distance(pairs.in_two_steps(a, c)[0], first) <= limit
        and _distance(pairs.in_two_steps(c, b)[1], second) <= limit
        and _distance(first, pairs.alone(a)) <= _MOST[dtype]
        and _distance(second, pairs.alone(b)) <= _MOST[dtype]
    )


def _distance(some: Tensor, others: Tensor) -> float:
    """Of the token with the largest, as a share of it. NaN if a number is."""
    some, others = some.float(), others.float()
    sizes = others.norm(dim=-1).clamp(min=torch.finfo().tiny)
    return float(((some - others).norm(dim=-1) / sizes).max())
