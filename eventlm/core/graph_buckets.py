"""For which batch sizes a worker has captured its decode step as a graph, and which of them a step runs as.

A graph has a fixed number of rows; a step of fewer is padded to it. The size is part of the step's launch, because
kernels may sum in another order for another one: a step that is run again must be padded alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

#: Sizes double up to it and go on in multiples of it: each graph holds memory, each row of padding costs time.
MULTIPLE = 16
#: Larger steps are launched kernel by kernel: with contexts of usual lengths they should keep the device for longer
#: than the host takes to do so.
LARGEST = 512


def default_buckets(max_num_seqs: int) -> list[int]:
    """Sizes for steps of 1 to `max_num_seqs` rows, and no more than LARGEST: 1, 2, 4, 8, multiples of 16, and the
    largest step's. Ascending.
    """
    largest = min(max_num_seqs, LARGEST)
    sizes = [1, 2, 4, 8, *range(MULTIPLE, largest, MULTIPLE)]
    return [size for size in sizes if size < largest] + [largest]


def bucket_of(buckets: Sequence[int], num_rows: int) -> int:
    """The smallest of ascending sizes that holds a step of so many decodes; 0, which is no graph, if none does."""
    index = bisect_left(buckets, num_rows)
    return buckets[index] if index < len(buckets) else 0
