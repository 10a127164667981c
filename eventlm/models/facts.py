"""What a server tells of its model: what clients of other servers show, and size their prompts by. Loads no torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from eventlm.models.checkpoint.safetensors_header import find_shards
from eventlm.models.gguf.source import GgufSource, read_source
from eventlm.models.spec import ModelSpec
from eventlm.models.transformers_model import ServedModel
from eventlm.models.weights.decoder_weights import model_weights


class ModelFacts(NamedTuple):
    """A model in figures; 0: unknown. The defaults are those of the fake one.

    family: as GGUF files call it, such as `llama`. file_format: `gguf` or `safetensors`. weights: how they are stored,
    such as `bfloat16` or `Q8_0`. num_bytes: of the files with weights. context_length: the longest it was made for.
    """

    embedding_size: int
    family: str = "fake"
    file_format: str = ""
    weights: str = ""
    num_layers: int = 0
    num_parameters: int = 0
    num_bytes: int = 0
    context_length: int = 0


def read_facts(folder: Path, model: ServedModel) -> ModelFacts:
    """The facts of the model in a checkpoint folder. Raises CheckpointError."""
    source = read_source(folder)
    if isinstance(model, ModelSpec):
        quantized = model.quantized.name if model.quantized is not None else ""
        num_parameters = sum(map(math.prod, model_weights(model).values()))
    else:
        quantized, num_parameters = "", model.num_weights
    return ModelFacts(
        embedding_size=model.hidden_size,
        family=_family(model.architecture) if source is None else source.architecture,
        file_format="safetensors" if source is None else "gguf",
        weights=_main_type(source) if source is not None else quantized or model.dtype,
        num_layers=len(model.layers),
        num_parameters=num_parameters,
        num_bytes=sum(path.stat().st_size for path in find_shards(folder))
        if source is None
        else sum(part.num_bytes for part in source.parts),
        context_length=model.max_position_embeddings,
    )


def _main_type(source: GgufSource) -> str:
    """The type that most of the file's bytes have."""
    num_bytes: Counter[str] = Counter()
    for part in source.parts:
        for tensor in part.tensors:
            num_bytes[tensor.type] += tensor.num_bytes
    return num_bytes.most_common(1)[0][0]


def _family(architecture: str) -> str:
    """`qwen3moe` for `Qwen3MoeForCausalLM`."""
    return re.sub(r"For[A-Z]\w*$", "", architecture).lower()
