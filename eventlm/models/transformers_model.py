"""What the engine must know of a model that transformers computes. Loads no torch.

Only transformers can tell how such a model attends: a child process makes it without its weights and runs it once.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec
from msgspec import Struct

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint.safetensors_header import find_shards, read_header
from eventlm.models.spec import KVShape, ModelSpec
from eventlm.models.weights.safetensors_weights import QUANTIZED_PARTS
from eventlm.models.weights.stored_weights import STORED_DTYPES
from eventlm.system.child_process import last_line, run_child


class AttentionCall(Struct, frozen=True, kw_only=True):
    """A call of the attention during a forward pass. window: as in `AttentionSpec`.

    Keys and values may be of different sizes (latent attention, DeepSeek V2 and V3).
    """

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    window: int = 0

    @property
    def kv_shape(self) -> KVShape:
        """In the cache, where the smaller one of a key and its value is padded."""
        return KVShape(self.num_kv_heads, max(self.key_size, self.value_size))


class TransformersModel(Struct, frozen=True, kw_only=True, tag=True):
    """A decoder that transformers computes. layers: the calls of its attention, in the order of a forward pass.

    `dtype` is the one that its weights are stored in, if config.json names it; `num_weights` counts elements, those of
    a tied output matrix twice, `body` is the module whose hidden states the output matrix multiplies.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    dtype: str
    num_weights: int
    body: str
    layers: tuple[AttentionCall, ...]

    @property
    def attentions(self) -> dict[int, AttentionCall]:
        """By their numbers."""
        return dict(enumerate(self.layers))

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """As `ModelSpec` has them."""
        return tuple(layer.kv_shape for layer in self.layers)


#: What of an error of transformers is quoted, which may be a page.
_QUOTED_CHARACTERS = 300

#: By one of eventlm's own forward passes, or by transformers.
ServedModel = ModelSpec | TransformersModel


class Refusal(Struct, frozen=True, tag=True):
    """Why transformers cannot compute a model here."""

    reason: str


def read_in_child(folder: Path) -> TransformersModel:
    """The model in `folder` as transformers makes it, found in a process of its own.

    Raises CheckpointError, naming the file and the reason, if it cannot be computed so.
    """
    path = folder / "config.json"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    found = _read(folder, content)
    if isinstance(found, Refusal):
        raise CheckpointError(found.reason)
    return found


def check_files(folder: Path) -> None:
    """Check that the files with its weights are whole and have no codes of quantized ones.

    What else they must hold, only transformers can tell. Raises CheckpointError.
    """
    for path in find_shards(folder):
        for name, info in read_header(path).tensors.items():
            if info.dtype not in STORED_DTYPES and name.endswith(("weight", *QUANTIZED_PARTS)):
                raise CheckpointError(
                    f"{path}: tensor {name} has dtype {info.dtype}, so the weights are quantized; the transformers "
                    "path runs only unquantized weights. Use a bfloat16 or float16 checkpoint"
                )


def in_one_line(error: Exception) -> str:
    """An error of transformers, or its beginning."""
    words = " ".join(str(error).split())
    return words if len(words) <= _QUOTED_CHARACTERS else words[:_QUOTED_CHARACTERS] + "…"


@lru_cache
def _read(folder: Path, content: bytes) -> TransformersModel | Refusal:
    """It takes seconds. `content`: of config.json, which may change."""
    ended = run_child("eventlm.models.transformers_probe", str(folder))
    if ended.code:
        return Refusal(f"{folder}: transformers cannot make its model: {last_line(ended.errors, ended.code)}")
    return msgspec.json.decode(ended.output.splitlines()[-1], type=TransformersModel | Refusal)
