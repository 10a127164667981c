"""The forward pass on a GPU of decoders that `gpu_decoder` is not made for: the program of `program.py`.

Its products, its experts and its attention are those of a GPU, all else are torch's operations. Nothing asks the device
for a number, so that a CUDA graph can be captured of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eventlm.kernels.gpu.store_heads import store_heads
from eventlm.models.decoder import Lap, no_lap
from eventlm.models.gpu_decoder import Attend, LayerCache, StepTokens
from eventlm.models.gpu_weights import GpuWeights
from eventlm.models.rope import rope_tables


class GpuProgram:
    """Runs the program of any decoder that `why_not_on_gpus` lets pass: no recurrent layers, heads that are alike in
    all layers, and keys and values that no layers share.
    """

    #: It has nothing for torch to compile.
    compiled = None

    def __init__(self, weights: GpuWeights, *, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        self._weights = weights
        self._ropes = rope_tables(weights.model, max_positions, dtype=dtype, device=device)

    def forward(
        self, tokens: StepTokens, last_tokens: Tensor, cache: LayerCache, attend: Attend, lap: Lap = no_lap
    ) -> Tensor:
        """As `GpuDecoder.forward`."""
        staged_T = tokens.staged_T.long()
        drawn_T = last_tokens[(-1 - staged_T).clamp(min=0)].clamp(min=0)
        sinks = self._weights.sinks

        def attention(layer: int, q_THD: Tensor, k_TKD: Tensor | None, v_TKD: Tensor | None) -> Tensor:
            assert k_TKD is not None
            assert v_TKD is not None
            store_heads(k_TKD, v_TKD, tokens.cache_slots_T, *cache.layer(layer))
            return attend(layer, q_THD, sinks[layer])

        token_ids_T = staged_T.where(staged_T >= 0, drawn_T)
        return self._weights.forward(
            token_ids_T, tokens.positions_T.long(), self._ropes, attention, lap, residual_TH=tokens.residual_TH
        )

    def norm(self, hidden_SH: Tensor) -> Tensor:
        """The last norm of the residual stream, [S, hidden_size]."""
        return self._weights.norm(hidden_SH)

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """Logits [S, V] of the residual stream of S tokens."""
        return self._weights.logits(hidden_SH)

    def weight_bytes(self) -> dict[str, int]:
        """See `Decoder.weight_bytes`."""
        return self._weights.weight_bytes()
