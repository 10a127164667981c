"""Which rows of a tensor are which weight's. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from eventlm.models.program import WeightKey
from eventlm.models.spec import DeltaSpec, ModelSpec


class RowRun(NamedTuple):
    """Rows of a tensor that follow each other: `num_rows` of a weight, from its row `first_row` on."""

    key: WeightKey
    first_row: int
    num_rows: int


def row_runs(shapes: Mapping[WeightKey, tuple[int, ...]], model: ModelSpec) -> Iterator[RowRun]:
    """All rows of the tensor that consists of weights of one layer with these shapes, in their order.

    The rows of each weight come in their own order, but in turns with the others' where the tensor has them by head.
    """
    by_name = {key.name: key for key in shapes}
    layer = model.layers[next(iter(shapes)).layer]
    attention, delta = layer.attention, layer.recurrent
    num_heads, turns = 1, [RowRun(key, 0, shape[0]) for key, shape in shapes.items()]
    if attention is not None and "output_gate" in by_name:
        # Each head's query, then its gate.
        num_heads = attention.num_heads
        turns = [RowRun(key, 0, attention.head_dim) for key in shapes]
    elif isinstance(delta, DeltaSpec) and by_name.keys() & {"delta_gate", "delta_beta"} and len(shapes) > 1:
        # Each key head's rows of each weight. Of `mixed` they are its query, its key, and its values.
        num_heads, size, values = delta.num_key_heads, delta.key_dim, delta.values_size // delta.num_key_heads
        turns = [RowRun(key, 0, shape[0] // num_heads) for key, shape in shapes.items()]
        if "mixed" in by_name:
            mixed, keys = by_name["mixed"], delta.keys_size
            turns[:1] = [RowRun(mixed, 0, size), RowRun(mixed, keys, size), RowRun(mixed, 2 * keys, values)]
    for head in range(num_heads):
        for key, first, num_rows in turns:
            yield RowRun(key, first + head * num_rows, num_rows)


def rows_of(shapes: Mapping[WeightKey, tuple[int, ...]], model: ModelSpec) -> dict[WeightKey, tuple[range, ...]]:
    """Of each weight the rows of the tensor that are its own, in its order."""
    runs: dict[WeightKey, list[tuple[int, range]]] = {key: [] for key in shapes}
    begin = 0
    for key, first_row, num_rows in row_runs(shapes, model):
        runs[key].append((first_row, range(begin, begin + num_rows)))
        begin += num_rows
    return {key: tuple(rows for _, rows in sorted(own, key=lambda run: run[0])) for key, own in runs.items()}
