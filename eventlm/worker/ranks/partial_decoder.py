"""A decoder in torch's operations that has a tensor rank's part of a model. All ranks have the residual stream.

Shapes: T tokens of a step, S of them whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from eventlm.kernels.int8_linear import int8_linear
from eventlm.models.decoder import Decoder
from eventlm.models.experts import Chosen
from eventlm.models.program import Experts, WeightKey, activation_of
from eventlm.worker.ranks.shard import Shard

#: [ranks, ...] in their order, from each of them one like what is given. Valid until the next call.
Gather = Callable[[Tensor], Tensor]
#: Of matrices that are split by their inputs.
_PARTIAL = ("output", "down")


class PartialDecoder(Decoder):
    """The decoder of a shard. What the ranks have computed apart is put together by `gather`.

    Products by columns are added up in float32 and in the order of the ranks, so that all ranks have the same bits.
    Biases come after the sum. All ranks make the same calls, and get the same results.

    rank: among the tensor ranks of the stage. others: what a decoder of another kind is made of beside a model.
    """

    def __init__(self, shard: Shard, rank: int, gather: Gather, **others: Any) -> None:
        super().__init__(shard.model, **others)
        self.rank = rank
        self._gather = gather
        self._vocab_starts = torch.tensor(shard.vocab_starts, device=next(iter(self.weights.values())).device)
        self._first_row = shard.vocab_starts[rank]
        sizes = self._vocab_starts.diff()
        self._sizes, self._largest = sizes.tolist(), int(sizes.max())

    def embed(self, token_ids_T: Tensor, multiplier: float) -> Tensor:
        """As `Decoder` says, of any token. Each rank looks up those that it has."""
        own_T = (token_ids_T - self._first_row).clamp(0, self.model.vocab_size - 1)
        owners_T = torch.bucketize(token_ids_T, self._vocab_starts, right=True) - 1
        rows_RTH = self._gather(super().embed(own_T, multiplier))
        rows: Tensor = rows_RTH[owners_T, torch.arange(len(token_ids_T), device=owners_T.device)]
        return rows

    def multiply_out(self, name: str, layer: int, x: Tensor) -> Tensor:
        """As `Decoder` says, of all ranks' columns."""
        if name not in _PARTIAL:
            return super().multiply_out(name, layer, x)
        total = self.sum_up(self._multiply_own(name, layer, x))
        bias = self.bias(name, layer)
        return (total if bias is None else total + bias).to(x.dtype)

    def pass_experts(self, operation: Experts, x: Tensor, chosen: Chosen) -> Tensor:
        """As `Decoder` says, of all ranks' columns of each expert."""
        spec, layer = operation.experts, operation.layer
        first = activation_of(spec.expert, layer)
        groups = list(chosen.groups(spec.num_experts))
        own = torch.zeros_like(x, dtype=torch.float32)
        for expert, tokens, shares in groups:
            given = self._multiply_own("down", layer, self.activate(first, x[tokens], expert), expert)
            own.index_add_(0, tokens, given * shares[:, None])
        total = self.sum_up(own)
        for expert, tokens, shares in groups:
            bias = self.bias("down", layer, expert)
            if bias is not None:
                total.index_add_(0, tokens, bias.float() * shares[:, None])
        return total.to(x.dtype)

    def logits(self, x: Tensor) -> Tensor:
        """As `Decoder` says, of the whole vocabulary."""
        own = super().logits(x)
        parts = self._gather(pad(own, (0, self._largest - own.shape[1])))
        return torch.cat([part[:, :size] for part, size in zip(parts, self._sizes, strict=True)], dim=1)

    def _multiply_own(self, name: str, layer: int, x: Tensor, expert: int = -1) -> Tensor:
        """The product by the columns of this rank, without a bias, in float32: it is rounded once, after the sum."""
        key = WeightKey(name, layer, "weight", expert)
        weight, scales = self.weights[key], self.scales.get(key)
        x = x.float()
        return linear(x, weight.float()) if scales is None else int8_linear(x, weight, scales, None)

    def sum_up(self, own: Tensor) -> Tensor:
        """The sum, in float32, of what each rank gives."""
        first, *others = self._gather(own)
        total: Tensor = first.to(torch.float32, copy=True)
        for part in others:
            total += part
        return total
