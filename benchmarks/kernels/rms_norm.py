"""Norms of rows of 4,096: bytes are those of each row once in and once out, with the residual stream twice that."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.case import KernelCase
from benchmarks.kernels.references import add_rms_norm_reference, rms_norm_reference
from eventlm.kernels.gpu.rms_norm import add_rms_norm, rms_norm

EPS = 1e-6


def cases(device: torch.device, *, smoke: bool) -> Iterator[KernelCase]:
    """Few tokens, of which the launch is most, and prefills."""
    hidden_size = 96 if smoke else 4096
    weight = torch.rand(hidden_size, device=device).bfloat16() + 0.5
    for num_tokens in (3,) if smoke else (1, 256, 8192):
        target = 0.8 if num_tokens == 8192 else 0.0
        given = torch.randn(2, num_tokens, hidden_size, device=device).bfloat16()
        yield KernelCase(
            name=f"rms_norm T={num_tokens}",
            run=partial(rms_norm, given[0], weight, EPS),
            reference=partial(rms_norm_reference, given[0], weight, EPS),
            num_bytes=given.nbytes,
            peer=partial(torch.nn.functional.rms_norm, given[0], (hidden_size,), weight, EPS),
            peer_name="torch",
            target=target,
            peer_target=1.0,
        )
        work = torch.empty_like(given)
        yield KernelCase(
            name=f"add_rms_norm T={num_tokens}",
            run=partial(_add, work, weight),
            reference=partial(_add_reference, given, weight),
            num_bytes=2 * given.nbytes,
            target=target,
            prepare=partial(_restore, work, given),
        )


def _add(work_2TH: Tensor, weight_H: Tensor) -> Tensor:
    add_rms_norm(work_2TH[0], work_2TH[1], weight_H, EPS)
    return work_2TH


def _add_reference(given_2TH: Tensor, weight_H: Tensor) -> Tensor:
    work = given_2TH.clone()
    add_rms_norm_reference(work[0], work[1], weight_H, EPS)
    return work


def _restore(work_2TH: Tensor, given_2TH: Tensor) -> None:
    work_2TH.copy_(given_2TH)
