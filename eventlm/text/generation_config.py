"""What a model's authors recommend for sampling, and its end tokens: generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from eventlm.models.json_files import convert_object, read_json_object
from eventlm.text.protocol import MinP, RepetitionPenalty, Temperature, TopP
from eventlm.text.tokenizer import Tokenizer

_StructT = TypeVar("_StructT", bound=msgspec.Struct)


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling of requests that leave it open. `top_k` 0 keeps the whole vocabulary. Used as vLLM uses them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()


class _GenerationConfig(msgspec.Struct):
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: int | None = None
    eos_token_id: int | list[int] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_p: MinP | None = None


class _ModelConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def load_generation_defaults(folder: Path, tokenizer: Tokenizer) -> GenerationDefaults:
    """The defaults of a checkpoint folder.

    A sequence ends at the tokenizer's end token and at those of generation_config.json, or of config.json where the
    former names none. Raises CheckpointError for a file that cannot be read.
    """
    config = _read(folder / "generation_config.json", _GenerationConfig)
    ends = config.eos_token_id
    if ends is None:
        ends = _read(folder / "config.json", _ModelConfig).eos_token_id
    eos_token_ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if tokenizer.eos_token_id is not None:
        eos_token_ids = [*eos_token_ids, tokenizer.eos_token_id]
    return GenerationDefaults(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=max(config.top_k or 0, 0),
        min_p=config.min_p or 0.0,
        repetition_penalty=1.0 if config.repetition_penalty is None else config.repetition_penalty,
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
    )


def _read(path: Path, type_: type[_StructT]) -> _StructT:
    return convert_object(read_json_object(path), type_, path) if path.is_file() else type_()
