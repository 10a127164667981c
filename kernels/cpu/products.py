"""Products with single matrices, norms and rotations, compiled (products.h): for models whose other operations torch
computes."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from eventlm.kernels import host_memory
from eventlm.kernels.cpu.native import library

#: Outputs of a panel; a bias has as many for the last one.
_PANEL = 32


class _Product(ctypes.Structure):
    _fields_ = (("memory", c_void_p), ("num_out", c_int64), ("bias", c_void_p), ("out", c_void_p))


class PackedMatrix:
    """A matrix [out, in] as the products of a build take it, and its bias."""

    def __init__(self, memory: Tensor, num_out: int, num_in: int, bias: Tensor | None) -> None:
        self.num_out, self.num_in = num_out, num_in
        #: What the products read.
        self.memory, self.bias = memory, bias


class MatrixGroup:
    """Matrices with the same inputs."""

    def __init__(self, matrices: Sequence[PackedMatrix]) -> None:
        self.matrices = matrices
        self.num_in = matrices[0].num_in
        biases = [None if each.bias is None else each.bias.data_ptr() for each in matrices]
        #: What the library reads. Each call first enters the addresses of its outputs.
        self.products = (_Product * len(matrices))(
            *(_Product(each.memory.data_ptr(), each.num_out, bias) for each, bias in zip(matrices, biases, strict=True))
        )


class Products:
    """Threads that compute one operation after the other, for one caller at a time, and room for matrices of these
    shapes, [out, in].

    MemoryError if the system does not give the threads, or what a call works on.
    """

    def __init__(self, build: str, shapes: Sequence[tuple[int, int]], *, num_threads: int) -> None:
        self._functions = library(build)
        #: Of the threads.
        self.handle: int = self._functions.eventlm_products(max(num_in for _, num_in in shapes), num_threads)
        if not self.handle:
            raise MemoryError
        weakref.finalize(self, self._functions.eventlm_free_products, self.handle)
        # In one piece, for that is of huge pages: of others a processor asks for one only as it comes to it.
        self._room = host_memory.zeros((sum(self._num_bytes(*shape) for shape in shapes),), torch.uint8)

    def _num_bytes(self, num_out: int, num_in: int) -> int:
        num_bytes: int = self._functions.eventlm_matrix_bytes(num_out, num_in)
        return num_bytes

    def pin(self, processors: Sequence[int]) -> None:
        """Keep each thread but the caller's on one of these processors, as many as there are threads."""
        numbers = array("i", processors)
        self._functions.eventlm_pin_products(self.handle, numbers.buffer_info()[0])

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedMatrix:
        """A matrix [out, in], rounded to bfloat16, and a bias [out], which stays float32.

        No more of them than there is room for.
        """
        num_out, num_in = weight.shape
        num_bytes = self._num_bytes(num_out, num_in)
        assert num_bytes <= len(self._room), "not among the shapes that there is room for"
        memory, self._room = self._room[:num_bytes], self._room[num_bytes:]
        rows = weight.detach().to(torch.bfloat16).contiguous()
        self._functions.eventlm_pack(self.handle, memory.data_ptr(), num_out, num_in, rows.data_ptr(), 0, num_out)
        padded = None
        if bias is not None:
            padded = torch.nn.functional.pad(bias.detach().float(), (0, -num_out % _PANEL))
        return PackedMatrix(memory, num_out, num_in, padded)

    def multiply(self, group: MatrixGroup, x: Tensor) -> list[Tensor]:
        """As `torch.nn.functional.linear`, of bfloat16, with each matrix."""
        x = x.contiguous()
        leading = x.shape[:-1]
        products, outs = group.products, []
        for number, matrix in enumerate(group.matrices):
            out = torch.empty((*leading, matrix.num_out), dtype=torch.bfloat16)
            products[number].out = out.data_ptr()
            outs.append(out)
        if num_rows := leading.numel():
            self._functions.eventlm_multiply(self.handle, products, len(products), group.num_in, x.data_ptr(), num_rows)
        return outs

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """(x / sqrt(mean(x^2) + eps)) * weight over the last dimension, a multiple of 16.

        x: bfloat16; weight: float32.
        """
        x = x.contiguous()
        out, size = torch.empty_like(x), len(weight)
        self._functions.eventlm_norm_rows(
            self.handle, x.data_ptr(), x.numel() // size, size, weight.data_ptr(), eps, out.data_ptr()
        )
        return out

    def rotate(self, x_HTD: Tensor, cosines_TD: Tensor, sines_TD: Tensor) -> Tensor:
        """x * cosines + y * sines, where y has the halves of D in the other order, the first with the other sign.

        All bfloat16; elements of a head lie side by side, and those of a token in what is returned, [H, T, D].
        """
        num_heads, num_tokens, head_dim = x_HTD.shape
        out_THD = torch.empty((num_tokens, num_heads, head_dim), dtype=torch.bfloat16)
        head_stride, token_stride, _ = x_HTD.stride()
        self._functions.eventlm_rotate(
            *(self.handle, x_HTD.data_ptr(), head_stride, token_stride),
            *(num_tokens, num_heads, head_dim),
            *(cosines_TD.data_ptr(), sines_TD.data_ptr(), out_THD.data_ptr()),
        )
        return out_THD.transpose(0, 1)
