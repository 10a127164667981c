"""A rank's part of a model on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from eventlm.models.experts import Chosen
from eventlm.models.gpu_weights import GpuWeights
from eventlm.models.program import Experts, WeightKey
from eventlm.models.spec import ModelSpec
from eventlm.worker.gpu.rank_exchange import GpuExchange
from eventlm.worker.ranks.partial_decoder import PartialDecoder
from eventlm.worker.ranks.shard import Shard


class GpuPart(NamedTuple):
    """What a rank computes of a model. exchange: with the other tensor ranks; None: there are none."""

    shard: Shard
    exchange: GpuExchange | None

    def make_weights(
        self, model: ModelSpec, *, types: Mapping[WeightKey, str], device: torch.device, is_invariant: bool
    ) -> GpuWeights:
        """Those of the shard, whose model this is."""
        if self.exchange is None:
            return GpuWeights(model, types, device, is_invariant=is_invariant)
        return PartialGpuWeights(
            self.shard,
            self.exchange.rank,
            self.exchange.gather,
            types=types,
            device=device,
            is_invariant=is_invariant,
        )


class PartialGpuWeights(PartialDecoder, GpuWeights):
    """A tensor rank's. What a rank gives to a sum is in the model's dtype, the sum in float32."""

    def pass_experts(self, operation: Experts, x: Tensor, chosen: Chosen) -> Tensor:
        """As `Decoder` says, of all ranks' columns of each expert."""
        own = self.sum_of_experts(operation, x, chosen, has_biases=self.rank == 0)
        return self.sum_up(own).to(x.dtype)

    def _multiply_own(self, name: str, layer: int, x: Tensor, expert: int = -1) -> Tensor:
        return self.product(x, self.matrix(name, layer, expert), None)
