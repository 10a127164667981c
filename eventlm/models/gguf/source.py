"""Where the weights of a checkpoint folder lie that was made of a GGUF file, and what they are called there.

Does not load the `gguf` package, which takes long, unless there is such a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint.safetensors_header import FileStamp
from eventlm.models.program import WeightKey

SOURCE_FILE = "gguf.json"
_SUFFIXES = (".weight", ".bias")
#: Ends of the names of tensors that have no suffix.
_WITHOUT_SUFFIX = ".ssm_a"
#: In these the rows of a head of queries and keys are in another order: rows that are rotated together are neighbours.
_INTERLEAVED = ("arcee", "granite", "granitemoe", "llama", "mistral3", "olmo", "smollm3")


#: What gguf-py calls the matrices of experts, of all of a layer together, and of the part that all tokens pass.
_OF_EXPERTS = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}
_FUSED_OF_EXPERTS = _OF_EXPERTS | dict.fromkeys(("gate", "up"), "ffn_gate_up_exps")
_SHARED = {"gate": "ffn_gate_shexp", "up": "ffn_up_shexp", "down": "ffn_down_shexp"}
#: Weights that gguf-py has no name for.
_ALONE = {
    "correction": "exp_probs_b.bias",
    "router_norm": "ffn_gate_inp.scale",
    "expert_scale": "ffn_down_exps.scale",
}


class GgufTensor(Struct, frozen=True):
    """A tensor: its type as ggml calls it, its shape, rows first, and its data's offset and length in bytes."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GgufPart(Struct, frozen=True):
    """A file, as it was when its header was read, and its tensors in the order of their data.

    path: as it is written, from the folder of the description. modified_ns: 0 for a file in that folder, since a copy
    of the folder has other times.
    """

    path: str
    num_bytes: int
    modified_ns: int
    tensors: list[GgufTensor]

    def stamp(self) -> FileStamp:
        """The file's stamp. CheckpointError if it is not the file whose header was read."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror or error}") from error
        try:
            stamp = FileStamp.of(descriptor)
        finally:
            os.close(descriptor)
        if stamp.num_bytes != self.num_bytes or self.modified_ns not in (0, stamp.modified_ns):
            raise CheckpointError(f"{self.path}: the file was changed since its header was read; start again")
        return stamp


class GgufSource(Struct, frozen=True):
    """The parts of a model; `fingerprint` is that of their content."""

    architecture: str
    fingerprint: str
    parts: list[GgufPart]

    @property
    def is_interleaved(self) -> bool:
        """Whether row i of the first half of a query's or key's head is at 2i, and that of the second at 2i + 1."""
        return self.architecture in _INTERLEAVED

    def tensor_names(self, names: Iterable[str], num_layers: int) -> dict[str, str]:
        """What the file calls each tensor that transformers calls by one of `names`."""
        from gguf.constants import MODEL_ARCH_NAMES
        from gguf.tensor_mapping import get_tensor_name_map

        architectures = {name: architecture for architecture, name in MODEL_ARCH_NAMES.items()}
        known = get_tensor_name_map(architectures[self.architecture], num_layers)
        # gguf-py has the second name, which llama.cpp's converter makes of the first.
        found = {
            name: known.get_name(name.replace(".dt_bias", ".dt_proj.bias"), try_suffixes=_SUFFIXES) for name in names
        }
        # Of what has no such name in transformers, it is added.
        return {
            name: name if one is None else one if one.endswith((*_SUFFIXES, _WITHOUT_SUFFIX)) else f"{one}.weight"
            for name, one in found.items()
        }


def expert_tensor(key: WeightKey, *, has_experts: bool, is_fused: bool = False) -> str | None:
    """The tensor that has a weight of a layer with experts; None for one that other layers may have too.

    has_experts: what all tokens pass has names of its own. is_fused: gate and up of an expert follow one another.
    """
    if key.name in _ALONE:
        return f"blk.{key.layer}.{_ALONE[key.name]}"
    names = (_FUSED_OF_EXPERTS if is_fused else _OF_EXPERTS) if key.expert >= 0 else _SHARED if has_experts else {}
    return f"blk.{key.layer}.{names[key.name]}.{key.kind}" if key.name in names else None


def read_source(folder: Path) -> GgufSource | None:
    """Where the weights of a folder in the cache lie; None if it was not made of a GGUF file."""
    path = folder / SOURCE_FILE
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    try:
        source = msgspec.json.decode(content, type=GgufSource)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: {error}; remove its folder, which is made again when it is needed") from error
    parts = [msgspec.structs.replace(part, path=os.path.join(folder, part.path)) for part in source.parts]
    return msgspec.structs.replace(source, parts=parts)
