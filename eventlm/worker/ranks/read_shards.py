"""How a checkpoint is split for the ranks of a replica. Loads no torch."""

from __future__ import annotations

from pathlib import Path

from eventlm.models.config import resolve_dtype
from eventlm.models.spec import ModelSpec
from eventlm.models.transformers_model import ServedModel
from eventlm.models.weights.find_weights import find_weights
from eventlm.models.weights.matrix_types import gpu_types, matrix_formats, matrix_types
from eventlm.worker.protocol import WorkerSetup
from eventlm.worker.ranks.shard import Shard, check_layout, shard_of


def read_shards(setup: WorkerSetup, config: ServedModel) -> list[Shard]:
    """What each rank of the replica has of the model; empty: there is one.

    Raises CheckpointError, and UsageError if the model cannot be split so.
    """
    layout = setup.layout
    if layout.num_ranks == 1:
        return []
    check_layout(config, layout)
    assert isinstance(config, ModelSpec)
    files = find_weights(Path(setup.model), config)
    is_on_gpu = setup.device != "cpu"
    types = gpu_types(files, config) if is_on_gpu else matrix_types(files, config, setup.quantization)
    dtype = resolve_dtype(config, setup.dtype, setup.quantization)
    formats = matrix_formats(types, dtype, setup.quantization)
    return [shard_of(config, layout, layout.place_of(rank), formats) for rank in range(layout.num_ranks)]
