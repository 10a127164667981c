"""The quantized matrices of a checkpoint, found and checked by the files' headers. Loads no torch."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint.safetensors_header import FileStamp, SafetensorsHeader
from eventlm.models.program import WeightKey
from eventlm.models.quantized.scheme import ALIASES, AWQ_ORDER, LEFT_OUT, PARTS, Method, PartSpec, Scheme
from eventlm.models.spec import ModelSpec
from eventlm.models.weights.slices import Ranges, count_of
from eventlm.models.weights.tensor_rows import rows_of

#: Ends of the names of parts that are no tensors of a module: of experts that are one tensor in a layer.
_ENDS_OF_STACKS = {
    "_packed": "weight_packed",
    "_blocks": "weight_packed",
    "_scales": "weight_scale",
    "_scale_inv": "weight_scale",
    "_activation_scale": "activation_scale",
}
_OTHER_MODEL = "the two files are not of one model"


class QuantizedPart(NamedTuple):
    """A tensor, or the part of it that belongs to an expert, and where its data lies in which file.

    rows, columns: what is wanted of it; empty: all.
    """

    path: Path
    stamp: FileStamp
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    rows: Ranges = ()
    columns: Ranges = ()

    @property
    def wanted_shape(self) -> tuple[int, ...]:
        """The shape of what is wanted."""
        if not (self.rows or self.columns):
            return self.shape
        wanted = (self.rows, self.columns)
        return tuple(count_of(ranges) or size for size, ranges in zip(self.shape, wanted, strict=False))


class QuantizedMatrix(NamedTuple):
    """A matrix [out, in], which may consist of several weights.

    weights: the outputs that are each one's, in its order. parts: by their names in `Scheme.parts`, perhaps without
    those that are optional. columns: the inputs that are wanted; empty: all.
    """

    weights: dict[WeightKey, tuple[range, ...]]
    num_out: int
    num_in: int
    scheme: Scheme
    parts: dict[str, QuantizedPart]
    columns: Ranges = ()

    @property
    def codes(self) -> QuantizedPart:
        """The largest part."""
        return max(self.parts.values(), key=lambda part: part.num_bytes)


class Parts:
    """The parts of quantized matrices among the tensors of a checkpoint, collected file by file.

    Modules are named as in `checkpoint_tensors`. stacks: the tensors, by these names, that the experts of a layer are
    if they are in one.
    """

    def __init__(self, method: Method, stacks: Container[str]) -> None:
        self._method, self._stacks = method, stacks
        self._found: dict[tuple[str, Scheme], dict[str, QuantizedPart]] = {}
        #: Of each module, and the names of its parts.
        self._schemes: dict[str, tuple[Scheme | None, Container[str]]] = {}

    def take(self, path: Path, header: SafetensorsHeader, name: str, role: str) -> bool:
        """Whether a tensor is a part, or belongs to one and is not needed.

        role: its name as `checkpoint_tensors` has it. Raises CheckpointError if it is there twice.
        """
        (own_module, _), (module, part) = _split(name), _split(role)
        if role in self._stacks:
            own_module, module, part = name, role, "weight"
        if part in LEFT_OUT:
            return True
        if part not in PARTS:
            return False
        if module not in self._schemes:
            scheme = self._method.scheme_of((own_module, module))
            self._schemes[module] = scheme, scheme.parts(1, 1).keys() if scheme else ()
        scheme, wanted = self._schemes[module]
        if scheme is None or part not in wanted:
            return False
        info = header.tensors[name]
        start, end = info.data_offsets
        parts = self._found.setdefault((module, scheme), {})
        if part in parts:
            raise CheckpointError(f"{path}: tensor {name} is in two files")
        parts[part] = QuantizedPart(
            path, header.stamp, name, info.dtype, info.shape, header.data_start + start, end - start
        )
        return True

    def matrices(
        self,
        missing: dict[str, list[WeightKey]],
        shapes: Mapping[WeightKey, tuple[int, ...]],
        model: ModelSpec,
        stacking: str,
    ) -> dict[Path, list[QuantizedMatrix]]:
        """All matrices by the file of their largest part, in the order of its data. They are no longer `missing`.

        stacking: see `TensorNames`. Raises CheckpointError if one is not the model's, or lacks a part, or has one of
        another shape or dtype.
        """
        found: dict[Path, list[QuantizedMatrix]] = {}
        for (module, scheme), parts in self._found.items():
            some = next(iter(parts.values()))
            role = next((role for role in (f"{module}.weight", module) if role in missing), "")
            weights = {key: shapes[key] for key in missing.pop(role, ())}
            if not weights or any(len(shape) != 2 for shape in weights.values()):
                raise CheckpointError(
                    f"{some.path}: tensor {some.name} belongs to no matrix of the model that config.json describes, "
                    f"or to one that is there twice; {_OTHER_MODEL}"
                )
            for matrix in _matrices(module, scheme, parts, weights, model, stacking if role == module else ""):
                found.setdefault(matrix.codes.path, []).append(matrix)
        for matrices in found.values():
            matrices.sort(key=lambda matrix: matrix.codes.offset)
        return found


def whole_names(role: str) -> tuple[str, str]:
    """The names that a tensor has that this one may be a part of: of a module, or of the experts of a layer."""
    module, _ = _split(role)
    return f"{module}.weight", module


def _split(name: str) -> tuple[str, str]:
    """A module, and the name of a part."""
    module, _, part = name.rpartition(".")
    if part in PARTS or part in LEFT_OUT or part in ALIASES:
        return module, ALIASES.get(part, part)
    for end, of_module in _ENDS_OF_STACKS.items():
        if part.endswith(end):
            return f"{module}.{part.removesuffix(end)}", of_module
    return module, part


def _matrices(
    module: str,
    scheme: Scheme,
    parts: dict[str, QuantizedPart],
    shapes: dict[WeightKey, tuple[int, ...]],
    model: ModelSpec,
    stacking: str,
) -> Iterator[QuantizedMatrix]:
    """stacking: of the experts of a layer, if they are in one tensor. Even `columns` are rows when they are packed."""
    experts = dict.fromkeys(key.expert for key in shapes)
    num_in = next(iter(shapes.values()))[1]
    num_out = sum(shape[0] for shape in shapes.values()) // len(experts)
    some = next(iter(parts.values()))
    multiple = {"fp4": scheme.group[1], "awq": 2}.get(scheme.layout, 1)
    if num_in % multiple or (scheme.layout == "awq" and num_out % len(AWQ_ORDER)):
        raise CheckpointError(
            f"{some.path}: tensor {some.name} is of {num_out} outputs and {num_in} inputs, which this format cannot "
            f"hold; {_OTHER_MODEL}"
        )
    for part, spec in scheme.parts(num_out, num_in).items():
        if part in parts:
            if stacking:
                spec = spec._replace(shapes=tuple((len(experts), *shape) for shape in spec.shapes))
            if stacking and part == "weight_packed":
                # Codes of 32 inputs are a row of bytes of their own.
                spec = spec._replace(shapes=((len(experts), num_out, num_in // 32, 16),))
            _check(parts[part], spec, scheme)
        elif not spec.is_optional:
            raise CheckpointError(f"{some.path}: {part} of {module} is missing; download the model again")
    for number, expert in enumerate(experts):
        own = {part: _of_expert(found, number) if stacking else found for part, found in parts.items()}
        shapes_of = {key: shape for key, shape in shapes.items() if key.expert == expert}
        weights = rows_of(shapes_of, model)
        if stacking == "columns":
            weights = {key: (range(turn, num_out, len(shapes_of)),) for turn, key in enumerate(shapes_of)}
        yield QuantizedMatrix(weights, num_out, num_in, scheme, own)


def _of_expert(part: QuantizedPart, number: int) -> QuantizedPart:
    num_bytes = part.num_bytes // part.shape[0]
    return part._replace(shape=part.shape[1:], offset=part.offset + number * num_bytes, num_bytes=num_bytes)


def _check(part: QuantizedPart, spec: PartSpec, scheme: Scheme) -> None:
    """Raise CheckpointError for a part of another dtype or shape."""
    if part.dtype not in spec.dtypes:
        raise CheckpointError(
            f"{part.path}: tensor {part.name} has dtype {part.dtype}, in this format it is {' or '.join(spec.dtypes)}; "
            "download the model again"
        )
    if part.shape not in spec.shapes:
        raise CheckpointError(
            f"{part.path}: tensor {part.name} has shape {list(part.shape)}, by config.json it is "
            f"{list(spec.shapes[0])} (scales are of {_described(scheme)}); {_OTHER_MODEL}"
        )


def _described(scheme: Scheme) -> str:
    outputs, inputs = (str(size) if size else "all" for size in scheme.group)
    return f"{outputs} {'output' if outputs == '1' else 'outputs'} and {inputs} inputs"
