"""Whether the output matrix of a checkpoint is its embedding, as config.json may say. Loads no torch."""

from __future__ import annotations

from pathlib import Path

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint.safetensors_header import (
    INDEX_FILE,
    SINGLE_FILE,
    SafetensorsHeader,
    TensorInfo,
    find_shards,
    read_header,
)
from eventlm.models.quantized.scheme import CODES
from eventlm.models.spec import TensorNames

#: Samples of two matrices that are compared, and bytes of each.
_NUM_SAMPLES = 16
_SAMPLE_BYTES = 4096


def has_own_head(folder: Path, names: TensorNames) -> bool:
    """Whether the safetensors files have a head beside an embedding, and the two differ, be it in dtype alone.

    A quantized head does.

    Raises CheckpointError for files that cannot be read.
    """
    if not any((folder / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        return False
    wanted = {f"{name}.weight" for name in (names.lm_head, names.prefix + names.embedding)}
    found: dict[str, tuple[Path, SafetensorsHeader, TensorInfo]] = {}
    for path in find_shards(folder):
        header = read_header(path)
        for name, info in header.tensors.items():
            role = names.without_alias(name)
            if role.startswith(f"{names.lm_head}.") and role.endswith(CODES):
                return True
            if role in wanted:
                found[role] = path, header, info
    if len(found) < 2:
        return False
    (*_, info), (*_, other) = found.values()
    if (info.dtype, info.shape) != (other.dtype, other.shape):
        return True
    samples, other_samples = (_samples(*one) for one in found.values())
    return samples != other_samples


def _samples(path: Path, header: SafetensorsHeader, tensor: TensorInfo) -> list[bytes]:
    """Pieces of a tensor's data at even distances."""
    start, end = tensor.data_offsets
    samples = []
    try:
        with path.open("rb") as file:
            for index in range(_NUM_SAMPLES):
                position = start + (end - start) * index // _NUM_SAMPLES
                file.seek(header.data_start + position)
                samples.append(file.read(min(_SAMPLE_BYTES, end - position)))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    return samples
