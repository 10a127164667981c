"""The sampling parameters that a model's authors recommend, and its end tokens: generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from eventlm.models.checkpoint.json_files import convert_object, read_json_object
from eventlm.sampling_params import MinP, RepetitionPenalty, SamplingParams, Temperature, TopP
from eventlm.text.tokenizer import Tokenizer

_StructT = TypeVar("_StructT", bound=msgspec.Struct)


class _GenerationConfig(msgspec.Struct):
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: int | None = None
    eos_token_id: int | list[int] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_p: MinP | None = None


#: Fields that become defaults unchanged.
_RECOMMENDED = ("temperature", "top_p", "min_p", "repetition_penalty")


class _ModelConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def load_generation_defaults(folder: Path, tokenizer: Tokenizer) -> SamplingParams:
    """The defaults for requests to a checkpoint folder, by the same rules as vLLM's.

    A sequence ends at the tokenizer's end token and at those of generation_config.json, or of config.json if the former
    has none. Raises CheckpointError for a file that cannot be read.
    """
    config = _read(folder / "generation_config.json", _GenerationConfig)
    ends = config.eos_token_id
    if ends is None:
        ends = _read(folder / "config.json", _ModelConfig).eos_token_id
    eos_token_ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if tokenizer.eos_token_id is not None:
        eos_token_ids = [*eos_token_ids, tokenizer.eos_token_id]
    recommended = {name: value for name in _RECOMMENDED if (value := getattr(config, name)) is not None}
    if config.top_k is not None:
        recommended["top_k"] = max(config.top_k, 0)
    return SamplingParams(**recommended, eos_token_ids=tuple(dict.fromkeys(eos_token_ids)))


def _read(path: Path, type_: type[_StructT]) -> _StructT:
    return convert_object(read_json_object(path, required=False), type_, path)
