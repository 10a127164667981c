"""SwiGLU and GeGLU of Qwen3-8B's width: bytes are those of gate, up and their product, each once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.case import KernelCase
from eventlm.kernels.gpu.gates import gelu_mul, silu_mul
from eventlm.kernels.pointwise import activate_gated

Gate = Callable[[Tensor], Tensor]


def cases(device: torch.device, *, smoke: bool) -> Iterator[KernelCase]:
    """Few tokens, of which the launch is most, and prefills."""
    size = 96 if smoke else 12_288
    gates: tuple[tuple[str, Gate, Gate], ...] = (
        ("silu_mul", silu_mul, partial(activate_gated, activation="silu")),
        ("gelu_mul", partial(gelu_mul, approximate="none"), partial(activate_gated, activation="gelu")),
        ("gelu_mul tanh", partial(gelu_mul, approximate="tanh"), partial(activate_gated, activation="gelu_tanh")),
    )
    for num_tokens in (3,) if smoke else (1, 256, 8192):
        gate_up = torch.randn(num_tokens, 2 * size, device=device).bfloat16()
        for name, gate, reference in gates:
            yield KernelCase(
                name=f"{name} T={num_tokens}",
                run=partial(gate, gate_up),
                reference=partial(reference, gate_up),
                num_bytes=gate_up.nbytes * 3 // 2,
                peer=partial(reference, gate_up),
                peer_name="torch, two kernels",
                target=0.8 if num_tokens == 8192 else 0.0,
                peer_target=1.0,
            )
