"""The weights of a decoder on a GPU, and its products there. Codes of 4 and 8 bits stay what they are in its memory.

Shapes: T tokens, E experts, A of them for each token, N outputs of a product.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from eventlm.kernels.gpu.grouped_gemm import grouped_gemm
from eventlm.kernels.gpu.matmul import matmul
from eventlm.kernels.gpu.packed_matmul import packed_matmul
from eventlm.kernels.gpu.packed_weight import PackedWeight, empty_packed
from eventlm.kernels.gpu.tuned import tuned
from eventlm.kernels.pointwise import activate, activate_gated
from eventlm.models.config import resolve_dtype
from eventlm.models.decoder import LAPS, Decoder
from eventlm.models.experts import Chosen
from eventlm.models.loader import default_dtype, find_checkpoint, torch_dtype
from eventlm.models.program import FLOAT32_WEIGHTS, LOOKED_UP, Experts, WeightKey
from eventlm.models.spec import ModelSpec
from eventlm.models.weights.matrix_types import gpu_types
from eventlm.models.weights.slices import ModelPart
from eventlm.models.weights.stored_weights import WeightFile
from eventlm.models.weights.weight_reader import read_pieces
from eventlm.types import OnProgress

#: x [T, in], matrix, bias [N] or None: [T, N].
Product = Callable[[Tensor, Tensor | PackedWeight, Tensor | None], Tensor]

_HEAD = WeightKey("lm_head", 0, "weight")


class GpuWeights(Decoder):
    """A decoder on `device`, weights uninitialized, in the default dtype.

    types: of the matrices that stay codes, see `gpu_types`. is_invariant: see `--batch-invariant`.
    """

    def __init__(
        self, model: ModelSpec, types: Mapping[WeightKey, str], device: torch.device, *, is_invariant: bool
    ) -> None:
        with torch.device("meta"):
            super().__init__(model)
        self._is_invariant = is_invariant
        self.product: Product = multiply_invariantly if is_invariant else multiply
        self._packed: dict[WeightKey, PackedWeight] = {}
        #: The matrices, or biases, of a layer's experts, [E, N, in] or [E, N].
        self._stacks: dict[WeightKey, Tensor | PackedWeight] = {}
        kinds = {fused: types.get(key, "") for key, (fused, _) in self._places.items()}
        is_tied, shapes = self.is_tied, self.weights
        self.weights = {}
        if is_tied:
            # It is the embedding, and takes no memory of its own.
            del shapes[_HEAD]
        for key, empty in shapes.items():
            experts = model.layers[key.layer].experts if key.expert >= 0 else None
            if experts is None:
                self._place(key, _allocated(empty, empty.shape, kinds.get(key, ""), device))
                continue
            stack = key._replace(expert=-1)
            if stack not in self._stacks:
                shape = (experts.num_experts, *empty.shape)
                self._stacks[stack] = _allocated(empty, shape, kinds.get(key, ""), device)
            found = self._stacks[stack]
            self._place(key, found[key.expert] if isinstance(found, Tensor) else found.of_expert(key.expert))
        if is_tied:
            self.weights[_HEAD] = self.embedding

    def _place(self, key: WeightKey, weight: Tensor | PackedWeight) -> None:
        if isinstance(weight, Tensor):
            self.weights[key] = weight
        else:
            self._packed[key] = weight

    def load_packed(self, key: WeightKey, first_row: int, blocks: Tensor) -> None:
        """Take in rows of a matrix that stays codes, from `first_row` on: uint8 [rows, bytes]."""
        fused, rows = self._places[key]
        self._packed[fused].load(rows.start + first_row, blocks)

    def matrix(self, name: str, layer: int, expert: int = -1) -> Tensor | PackedWeight:
        """What `product` multiplies by."""
        key = WeightKey(name, layer, "weight", expert)
        return self._packed[key] if key in self._packed else self.weights[key]

    def multiply(self, name: str, layer: int, x: Tensor, expert: int = -1) -> Tensor:
        return self.product(x, self.matrix(name, layer, expert), self.bias(name, layer, expert))

    def pass_experts(self, operation: Experts, x: Tensor, chosen: Chosen) -> Tensor:
        """As `Decoder.pass_experts`, without the host's knowing which experts have which tokens."""
        return self.sum_of_experts(operation, x, chosen).to(x.dtype)

    def sum_of_experts(self, operation: Experts, x: Tensor, chosen: Chosen, *, has_biases: bool = True) -> Tensor:
        """The same in float32. has_biases: whether those of `down` are in it."""
        spec, layer = operation.experts, operation.layer
        num_tokens, num_active = chosen.experts_TA.shape
        experts, order = chosen.experts_TA.flatten().sort(stable=True)
        firsts = torch.arange(spec.num_experts + 1, device=x.device)
        offsets = torch.searchsorted(experts, firsts, out_int32=True)
        config = tuned("grouped_gemm", dtype=str(x.dtype).removeprefix("torch.")) if self._is_invariant else None

        def product(name: str, rows: Tensor) -> Tensor:
            stack, bias = (self._stacks.get(WeightKey(name, layer, kind)) for kind in ("weight", "bias"))
            if name == "down" and not has_biases:
                bias = None
            if isinstance(stack, PackedWeight):
                out = packed_matmul(rows, stack, offsets_E1=offsets, is_invariant=self._is_invariant)
            else:
                assert stack is not None
                out = grouped_gemm(rows, stack, offsets, max_rows=num_tokens, config=config)
            assert bias is None or isinstance(bias, Tensor)
            return out if bias is None else out + bias[experts]

        first, function = ("gate_up", activate_gated) if spec.expert.is_gated else ("up", activate)
        inner = function(product(first, x[order // num_active]), spec.expert.activation)
        given = product("down", inner)
        products_TAN = torch.empty_like(given, dtype=torch.float32)
        products_TAN[order] = given.float()
        products_TAN = products_TAN.unflatten(0, (num_tokens, num_active)) * chosen.shares_TA[..., None]
        out: Tensor = products_TAN[:, 0]
        for number in range(1, num_active):
            out = out + products_TAN[:, number]
        return out

    def weight_bytes(self) -> dict[str, int]:
        found = super().weight_bytes()
        for key, matrix in self._packed.items():
            name = "experts" if key.expert >= 0 else LAPS[key.name]
            found[name] = found.get(name, 0) + matrix.nbytes
        return found


class MakeWeights(Protocol):
    """Makes `GpuWeights`, or what extends them."""

    def __call__(
        self, model: ModelSpec, *, types: Mapping[WeightKey, str], device: torch.device, is_invariant: bool
    ) -> GpuWeights: ...


def multiply_invariantly(x: Tensor, matrix: Tensor | PackedWeight, bias: Tensor | None) -> Tensor:
    """A `Product` that gives a row the same bits in any batch."""
    if isinstance(matrix, PackedWeight):
        return packed_matmul(x, matrix, bias, is_invariant=True)
    return matmul(x, matrix, bias)


def multiply(x: Tensor, matrix: Tensor | PackedWeight, bias: Tensor | None) -> Tensor:
    """A `Product`, by the vendor's library if the matrix is not packed."""
    return packed_matmul(x, matrix, bias) if isinstance(matrix, PackedWeight) else linear(x, matrix, bias)


def _allocated(empty: Tensor, shape: Sequence[int], kind: str, device: torch.device) -> Tensor | PackedWeight:
    """Room on the device for what has the dtype of `empty`, or for codes of a type."""
    if kind:
        return empty_packed(kind, *shape, device=device)
    return empty.new_empty(shape, device=device)


def load_gpu_weights(
    folder: str | Path,
    *,
    dtype: str = "auto",
    device: torch.device,
    is_invariant: bool,
    part: ModelPart | None = None,
    make: MakeWeights = GpuWeights,
    on_progress: OnProgress | None = None,
) -> GpuWeights:
    """The weights of the checkpoint in `folder` on a GPU.

    part: what to take of it. make: what they are made by.

    Raises CheckpointError, and calls `on_progress`, like `load_decoder`.
    """
    model, files = find_checkpoint(folder, part)
    with default_dtype(torch_dtype(resolve_dtype(model, dtype))):
        types = gpu_types(files, model)
        decoder = make(model, types=types, device=device, is_invariant=is_invariant)
        _say_what_is_widened(files, types, is_tied=decoder.is_tied)
    for key, first_row, values in read_pieces(files, on_progress, in_blocks=types):
        if key in types:
            decoder.load_packed(key, first_row, values)
        else:
            target, _ = decoder.target(key)
            target[first_row : first_row + len(values)].copy_(values)
    return decoder


def _say_what_is_widened(files: Sequence[WeightFile], packed: Container[WeightKey], *, is_tied: bool) -> None:
    """The quantized matrices to multiply by that do not stay codes: how many, their types, and their bytes widened."""
    never_codes = {*FLOAT32_WEIGHTS, *LOOKED_UP} - ({"embedding"} if is_tied else set())
    widened: Counter[str] = Counter()
    num_bytes = 0
    for file in files:
        found = [(weight.dtype, weight.shape, [weight.key]) for weight in file.weights if weight.num_bytes]
        found += [
            (f"{matrix.scheme.layout} of {matrix.scheme.bits} bits", (matrix.num_out, matrix.num_in), [*matrix.weights])
            for matrix in file.quantized
        ]
        for kind, shape, keys in found:
            if any(key not in packed and key.name not in never_codes for key in keys):
                widened[kind] += 1
                num_bytes += math.prod(shape) * torch.get_default_dtype().itemsize
    if widened:
        types = ", ".join(f"{count:,} of type {kind}" for kind, count in sorted(widened.items()))
        # The engine logs what a worker prints.
        print(
            f"quantized matrices whose codes GPUs do not multiply by are widened as they are read: {types}; they take "
            f"{num_bytes >> 20:,} MiB",
            file=sys.stderr,
        )
