"""The weights of a decoder in GGUF files, found and checked by the headers. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import structs

from eventlm.errors import CheckpointError
from eventlm.models.gguf.source import GgufPart, GgufSource, GgufTensor, expert_tensor
from eventlm.models.program import WeightKey
from eventlm.models.spec import ModelSpec, TensorNames
from eventlm.models.weights.decoder_weights import model_weights
from eventlm.models.weights.stored_weights import STORED_DTYPES, StoredWeight, WeightFile
from eventlm.models.weights.tensor_names import checkpoint_tensors
from eventlm.models.weights.tensor_rows import row_runs

#: End of the name of a matrix of queries, keys, values and gates.
_FUSED = ".ssm_in.weight"
#: And of gates and ups of experts.
_GATE_UP = ".ffn_gate_up_exps.weight"


def find_in_gguf(source: GgufSource, model: ModelSpec) -> list[WeightFile]:
    """The GGUF files of a model with the decoder's weights. Raises CheckpointError like `find_weights`."""
    shapes, missing = model_weights(model), _tensors(source, model)
    # Where those of transformers are left out that begin with the name of a layer, so are llama.cpp's.
    ignored = tuple(start.replace("model.layers.", "blk.") for start in model.names.ignored)
    modules = [f"{start}weight" for start in model.names.ignored if start.startswith("model.layers.")]
    ignored += tuple(source.tensor_names(modules, model.num_layers).values())
    files = []
    for part in source.parts:
        weights: list[StoredWeight] = []
        for tensor in part.tensors:
            if tensor.name.startswith(ignored):
                continue
            if tensor.name not in missing:
                raise CheckpointError(
                    f"{part.path}: tensor {tensor.name} is not one of {model.architecture} as the metadata describe "
                    "it; such models are not supported"
                )
            weights += _rows(part, tensor, {key: shapes[key] for key in missing.pop(tensor.name)}, source, model)
        files.append(WeightFile(Path(part.path), part.stamp(), weights))
    if missing:
        more = f" ({len(missing)} are)" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{source.parts[0].path}: tensor {next(iter(missing))} is missing{more}; download the model again"
        )
    return files


def _tensors(source: GgufSource, model: ModelSpec) -> dict[str, list[WeightKey]]:
    """The name of each tensor in the files, and the weights that its rows are, in their order.

    The matrices of all experts of a layer are one tensor, those of gate and up two.
    """
    tensors: dict[str, list[WeightKey]] = {}
    others = []
    is_fused = any(tensor.name.endswith(_GATE_UP) for part in source.parts for tensor in part.tensors)
    for key in model_weights(model):
        experts = model.layers[key.layer].experts
        has_experts = experts is not None and not experts.has_norms
        if (name := expert_tensor(key, has_experts=has_experts, is_fused=is_fused)) is not None:
            tensors.setdefault(name, []).append(key)
        else:
            others.append(key)
    roles = checkpoint_tensors(model, _names_in(source, model), others)
    names = source.tensor_names(roles, model.num_layers)
    return tensors | {names[role]: keys for role, keys in roles.items()}


def _names_in(source: GgufSource, model: ModelSpec) -> TensorNames:
    """Those of transformers; the converter takes gates of layers with a state out of a matrix, and once did not."""
    is_fused = any(tensor.name.endswith(_FUSED) for part in source.parts for tensor in part.tensors)
    return model.names if is_fused else structs.replace(model.names, mixed_and_gate="")


def _rows(
    part: GgufPart,
    tensor: GgufTensor,
    shapes: dict[WeightKey, tuple[int, ...]],
    source: GgufSource,
    model: ModelSpec,
) -> Iterator[StoredWeight]:
    """The weights that a tensor consists of, with what undoes what llama.cpp's converter did to them."""
    num_rows, first = sum(shape[0] for shape in shapes.values()), next(iter(shapes))
    expected = [num_rows, *shapes[first][1:]]
    if first.expert >= 0:
        num_experts = len({key.expert for key in shapes})
        expected = [num_experts, num_rows // num_experts, *shapes[first][1:]]
    # A matrix of one row is a vector.
    if list(tensor.shape) not in (expected, expected[1:] if expected[0] == 1 else expected):
        raise CheckpointError(
            f"{part.path}: tensor {tensor.name} has shape {list(tensor.shape)}, by the metadata it is {expected}; "
            "download the file again"
        )
    is_blocks = tensor.type not in STORED_DTYPES
    if is_blocks and len(shapes[first]) == 1:
        raise CheckpointError(
            f"{part.path}: tensor {tensor.name} is a vector of type {tensor.type}, and vectors must be F32, F16 or "
            "BF16; take another file of the model"
        )
    row_bytes, offset = tensor.num_bytes // num_rows, tensor.offset
    for key, first_row, num_own in row_runs(shapes, model):
        attention = model.layers[key.layer].attention if key.name in ("query", "key") else None
        is_norm = key.name.endswith("_norm") and key.kind == "weight"
        yield StoredWeight(
            key,
            tensor.name,
            tensor.type,
            (num_own, *shapes[key][1:]),
            offset,
            num_bytes=row_bytes * num_own if is_blocks else 0,
            head_rows=attention.head_dim if source.is_interleaved and attention is not None else 0,
            added=-model.norm.offset if is_norm else 0.0,
            exponentials=key.name == "decay_rate",
            first_row=first_row,
        )
        offset += row_bytes * num_own
