"""Which experts of a mixture each token passes, in torch.

Shapes: T tokens, E experts, A of them for each token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from eventlm.models.spec import ExpertsSpec


class Chosen(NamedTuple):
    """Numbers of the experts of each token, ascending, int64 [T, A], and the share of each, float32 [T, A]."""

    experts_TA: Tensor
    shares_TA: Tensor

    def groups(self, num_experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Each expert that has tokens, in the order of their numbers, with its tokens, ascending, and their shares."""
        ordered = self.experts_TA.flatten().argsort(stable=True)
        counts = self.experts_TA.flatten().bincount(minlength=num_experts).tolist()
        for expert, places in enumerate(ordered.split(counts)):
            if len(places):
                yield expert, places // self.experts_TA.shape[1], self.shares_TA.flatten()[places]


def route(
    spec: ExpertsSpec, products_TE: Tensor, correction_E: Tensor | None = None, scale_E: Tensor | None = None
) -> Chosen:
    """The experts for the router's products, float32. Of experts with equal numbers the first are chosen."""
    all_TE = products_TE.softmax(-1) if spec.routing == "softmax" else products_TE.sigmoid()
    ranked_TE = all_TE if correction_E is None else all_TE + correction_E
    if spec.num_active_groups < spec.num_groups:
        ranked_TE = _of_best_groups(spec, ranked_TE)
    # Unlike topk, a stable sort has an order of equal numbers.
    experts_TA, _ = ranked_TE.argsort(dim=-1, descending=True, stable=True)[:, : spec.num_active].sort()
    shares_TA = all_TE.gather(-1, experts_TA)
    if spec.is_normalized:
        shares_TA = shares_TA / shares_TA.sum(-1, keepdim=True).clamp(min=spec.min_sum)
    shares_TA = shares_TA * spec.scaling
    return Chosen(experts_TA, shares_TA if scale_E is None else shares_TA * scale_E[experts_TA])


def _of_best_groups(spec: ExpertsSpec, ranked_TE: Tensor) -> Tensor:
    """The same with the experts of other groups ranked last."""
    groups_TGE = ranked_TE.unflatten(-1, (spec.num_groups, -1))
    sums_TG = groups_TGE.topk(2, dim=-1)[0].sum(-1)
    best_TG = sums_TG.argsort(dim=-1, descending=True, stable=True)[:, : spec.num_active_groups]
    is_last_TG = torch.ones_like(sums_TG, dtype=torch.bool).scatter_(-1, best_TG, value=False)
    ranked_TE = groups_TGE.masked_fill(is_last_TG[..., None], -torch.inf).flatten(-2)
    return ranked_TE
