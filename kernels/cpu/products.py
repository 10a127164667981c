"""Products with single matrices, compiled (products.h): for models whose other operations torch computes."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from eventlm.kernels import host_memory
from eventlm.kernels.cpu.native import library

#: Outputs of a panel; a bias has as many for the last one.
_PANEL = 32


class Products:
    """Threads that multiply by one matrix after the other, of at most `most_inputs`, for one caller at a time.

    MemoryError if the system does not give the threads, or what a call works on.
    """

    def __init__(self, build: str, *, most_inputs: int, num_threads: int) -> None:
        self._functions = library(build)
        self._handle = self._functions.eventlm_products(most_inputs, num_threads)
        if not self._handle:
            raise MemoryError
        weakref.finalize(self, self._functions.eventlm_free_products, self._handle)

    def pin(self, processors: Sequence[int]) -> None:
        """Keep each thread but the caller's on one of these processors, as many as there are threads."""
        numbers = array("i", processors)
        self._functions.eventlm_pin_products(self._handle, numbers.buffer_info()[0])

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedMatrix:
        """A matrix [out, in], rounded to bfloat16, and a bias [out], which stays float32."""
        num_out, num_in = weight.shape
        memory = host_memory.zeros((self._functions.eventlm_matrix_bytes(num_out, num_in),), torch.uint8)
        rows = weight.detach().to(torch.bfloat16).contiguous()
        self._functions.eventlm_pack(self._handle, memory.data_ptr(), num_out, num_in, rows.data_ptr(), 0, num_out)
        padded = None
        if bias is not None:
            padded = torch.nn.functional.pad(bias.detach().float(), (0, -num_out % _PANEL))
        return PackedMatrix(memory, num_out, num_in, padded)

    def multiply(self, matrix: PackedMatrix, x: Tensor) -> Tensor:
        """As `torch.nn.functional.linear`, of bfloat16."""
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], matrix.num_out), dtype=torch.bfloat16)
        if x.numel():
            self._functions.eventlm_multiply(
                self._handle,
                matrix.memory_address,
                matrix.num_out,
                matrix.num_in,
                x.data_ptr(),
                x.numel() // matrix.num_in,
                matrix.bias_address,
                out.data_ptr(),
            )
        return out


class PackedMatrix:
    """A matrix as the products of a build take it, and its bias."""

    def __init__(self, memory: Tensor, num_out: int, num_in: int, bias: Tensor | None) -> None:
        self.num_out, self.num_in = num_out, num_in
        # They hold what the addresses name.
        self._memory, self._bias = memory, bias
        self.memory_address = memory.data_ptr()
        self.bias_address = None if bias is None else bias.data_ptr()
