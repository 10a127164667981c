"""Cuts what is found in a checkpoint's files down to what a smaller decoder has. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import lcm
from typing import NamedTuple

from eventlm.models.program import WeightKey
from eventlm.models.quantized.scheme import WORD_BITS, Scheme
from eventlm.models.weights.quantized_matrices import QuantizedMatrix, QuantizedPart
from eventlm.models.weights.slices import Ranges, Slice, Slices, count_of, covering, places_in, shifted, spread, within
from eventlm.models.weights.stored_weights import StoredWeight, WeightFile

#: Parts that only tell whether a whole matrix is what it should be.
_ONLY_CHECKED = ("weight_shape", "bias")


class _Wanted(NamedTuple):
    """What a smaller decoder has of a weight, and what it is called there."""

    key: WeightKey
    slice: Slice


class _Axis(NamedTuple):
    """Of a part of a quantized matrix: `size` outputs or inputs are one step along it. 0: it is not cut."""

    is_out: bool
    size: int


def cut_weights(files: Sequence[WeightFile], slices: Slices) -> list[WeightFile]:
    """The files with the weights of the smaller decoder, of which only the slices are read.

    Each slice is of another weight.
    """
    wanted = {slice_.key: _Wanted(key, slice_) for key, slice_ in slices.items()}
    return [
        file._replace(
            weights=[cut for weight in file.weights if (cut := _cut_weight(weight, wanted)) is not None],
            quantized=[_cut_matrix(matrix, wanted) for matrix in file.quantized if _has_any(matrix.weights, wanted)],
        )
        for file in files
    ]


def used_files(files: Sequence[WeightFile], slices: Slices) -> list[WeightFile]:
    """The files with the quantized matrices that the slices are of, whole."""
    wanted = {slice_.key for slice_ in slices.values()}
    return [
        file._replace(quantized=[matrix for matrix in file.quantized if _has_any(matrix.weights, wanted)])
        for file in files
    ]


def _has_any(keys: Iterable[WeightKey], wanted: Iterable[WeightKey]) -> bool:
    return any(key in wanted for key in keys)


def _cut_weight(weight: StoredWeight, wanted: Mapping[WeightKey, _Wanted]) -> StoredWeight | None:
    """None if nothing is wanted of it."""
    if weight.key not in wanted:
        return None
    key, (_, rows, columns) = wanted[weight.key]
    num_rows, first_row = weight.shape[0], weight.first_row
    if weight.interleaved:
        # All in turns have as many rows, and they lie as columns if they have any.
        rows, turns = spread(rows, len(weight.interleaved)), tuple(wanted[each].key for each in weight.interleaved)
        if len(weight.shape) > 1:
            rows, columns = columns, rows
        cut = weight._replace(key=turns[0], interleaved=turns)
    else:
        cut = weight._replace(key=key)
        if rows:
            cut = cut._replace(first_row=count_of(within(rows, range(first_row))))
            rows = shifted(within(rows, range(first_row, first_row + num_rows)), -first_row)
            if not rows:
                return None
    return cut._replace(
        rows=_unless_all(rows, num_rows), columns=_unless_all(columns, weight.shape[1]) if columns else ()
    )


def _unless_all(ranges: Ranges, count: int) -> Ranges:
    return () if count_of(ranges) == count else ranges


def _cut_matrix(matrix: QuantizedMatrix, wanted: Mapping[WeightKey, _Wanted]) -> QuantizedMatrix:
    scheme = matrix.scheme
    parts = {name: part for name, part in matrix.parts.items() if name not in _ONLY_CHECKED}
    if not scheme.has_order:
        parts = {name: part for name, part in parts.items() if not name.endswith("g_idx")}
    axes = {name: _axes(scheme, name) for name in parts}
    out_granule, in_granule = (
        lcm(*(axis.size for of_part in axes.values() for axis in of_part if axis.is_out is is_out and axis.size))
        for is_out in (True, False)
    )
    own = [wanted[key] for key in matrix.weights if key in wanted]
    picked = {each.key: _picked(matrix.weights[each.slice.key], each.slice.rows) for each in own}
    hulls = sorted((range(run[0], run[-1] + 1) for runs in picked.values() for run in runs), key=lambda run: run.start)
    kept_out = covering(hulls, out_granule, matrix.num_out)
    columns = _unless_all(own[0].slice.columns, matrix.num_in) or (range(matrix.num_in),)
    kept_in = covering(columns, in_granule, matrix.num_in)
    return QuantizedMatrix(
        {key: tuple(_placed(run, kept_out) for run in runs) for key, runs in picked.items()},
        count_of(kept_out),
        count_of(kept_in),
        scheme,
        {name: _cut_part(part, axes[name], kept_out, kept_in) for name, part in parts.items()},
        columns=_unless_all(places_in(columns, kept_in), count_of(kept_in)),
    )


def _axes(scheme: Scheme, name: str) -> tuple[_Axis, ...]:
    """Of the tensor that a part is."""
    in_word = WORD_BITS // scheme.bits
    outputs, inputs = _Axis(True, 1), _Axis(False, 1)
    # Where inputs are in no order, any may have any group.
    groups = _Axis(False, 0 if scheme.has_order else scheme.group[1])
    if name.endswith("g_idx"):
        return (inputs,)
    match scheme.layout, name:
        case "gptq", "qweight":
            return _Axis(False, in_word), outputs
        case "awq", "qweight":
            return inputs, _Axis(True, in_word)
        case _, "qzeros":
            return groups, _Axis(True, in_word)
        case _, "scales":
            return groups, outputs
        case "packed", "weight_packed":
            return outputs, _Axis(False, in_word)
        case "packed", "weight_zero_point":
            return _Axis(True, in_word), groups
        case "fp4", "weight_packed":
            # Two in a byte.
            return outputs, _Axis(False, 2)
        case _, "weight":
            return outputs, inputs
    return _Axis(True, scheme.group[0]), groups


def _cut_part(part: QuantizedPart, axes: Sequence[_Axis], kept_out: Ranges, kept_in: Ranges) -> QuantizedPart:
    if len(part.shape) > 2:
        # Bytes of 32 inputs are a row of their own.
        part = part._replace(shape=(part.shape[0], part.shape[1] * part.shape[2]))
    cuts: list[Ranges] = [(), ()]
    for number, (length, axis) in enumerate(zip(part.shape, axes, strict=False)):
        if axis.size and length > 1:
            kept = kept_out if axis.is_out else kept_in
            steps = tuple(range(each.start // axis.size, -(-each.stop // axis.size)) for each in kept)
            cuts[number] = _unless_all(steps, length)
    return part._replace(rows=cuts[0], columns=cuts[1])


def _picked(runs: Sequence[range], rows: Ranges) -> list[range]:
    """Those that `rows` number among the numbers of the runs, one run after the other."""
    if not rows:
        return list(runs)
    return list(_each_picked(runs, rows))


def _each_picked(runs: Sequence[range], rows: Ranges) -> Iterator[range]:
    first = 0
    for run in runs:
        for part in within(rows, range(first, first + len(run))):
            yield run[part.start - first : part.stop - first]
        first += len(run)


def _placed(run: range, kept: Ranges) -> range:
    """Where its numbers are among the kept ones, of which all between them are."""
    first = 0
    for each in kept:
        if run.start in each:
            break
        first += len(each)
    offset = first - each.start
    return range(run.start + offset, run.stop + offset, run.step)
