from __future__ import annotations

import torch
import triton
import triton.language as tl

from eventlm.kernels.gpu.soft_cap import capped_softly, soft_cap_factor


@triton.jit
def _cap(scores, out, CAP: tl.constexpr, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    shares = tl.load(scores + places) * soft_cap_factor(CAP)
    tl.store(out + places, capped_softly(shares, CAP))


def test_scores_are_capped_in_units_of_the_binary_logarithm(device: torch.device) -> None:
    cap, unit = 3.0, 1.4426950408889634
    scores = torch.tensor([0.0, 1e-3, -0.5, 3.0, -40.0, 1e4, -1e30, 7.5], device=device)
    out = torch.empty_like(scores)
    _cap[(1,)](scores * unit, out, CAP=cap, SIZE=8)
    torch.testing.assert_close(out / unit, cap * (scores / cap).tanh(), atol=1e-6, rtol=1e-6)
