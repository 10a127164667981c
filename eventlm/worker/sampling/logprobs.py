"""Log-probabilities of tokens under the model's own logits, before any sampling parameter changes them.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eventlm.sampling_params import TokenLogprobs
from eventlm.worker.sampling.candidates import top_entries
from eventlm.worker.sampling.sampler import SLICE_ENTRIES, slices

#: Logits [n, V] of the tokens at these places.
LogitsOf = Callable[[slice], Tensor]


def token_logprobs(logits_of: LogitsOf, token_ids_N: Tensor, vocab_size: int, num_top: int) -> TokenLogprobs:
    """Log-probability and rank of each token, and the `num_top` most likely ones in its place (all, if negative).

    The logits, of any floating dtype, are asked for in slices, so that no more than 16 MiB of them are there in
    float32 at a time. Equal ones rank by token id.
    """
    num_top = vocab_size if num_top < 0 else min(num_top, vocab_size)
    found = TokenLogprobs(logprobs=[], ranks=[], top_ids=[], top_logprobs=[])
    for span in slices(len(token_ids_N), vocab_size, SLICE_ENTRIES):
        logits = logits_of(span).float()
        ids = token_ids_N[span, None]
        total, own = logits.logsumexp(dim=-1, keepdim=True), logits.gather(1, ids)
        entries = torch.arange(vocab_size, device=logits.device)
        is_before = (logits > own) | ((logits == own) & (entries < ids))
        found.logprobs.extend((own - total).flatten().tolist())
        found.ranks.extend((is_before.sum(dim=-1) + 1).tolist())
        if num_top:
            values, top_ids = top_entries(logits, num_top)
            found.top_ids.extend(top_ids.tolist())
            found.top_logprobs.extend((values - total).tolist())
        else:
            found.top_ids.extend([] for _ in range(len(logits)))
            found.top_logprobs.extend([] for _ in range(len(logits)))
    return found


def one_of(logprobs: TokenLogprobs, place: int, num_top: int) -> TokenLogprobs:
    """Those of one token, with `num_top` of the most likely ones (all, if negative)."""
    top = slice(None) if num_top < 0 else slice(num_top)
    return TokenLogprobs(
        logprobs=[logprobs.logprobs[place]],
        ranks=[logprobs.ranks[place]],
        top_ids=[logprobs.top_ids[place][top]],
        top_logprobs=[logprobs.top_logprobs[place][top]],
    )
