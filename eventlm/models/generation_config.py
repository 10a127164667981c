"""generation_config.json: the ends and the sampling defaults that a checkpoint's authors chose.

Loads no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from eventlm.errors import CheckpointError
from eventlm.models.config import as_token_ids, read_config, read_json_object


class GenerationDefaults(Struct, frozen=True, kw_only=True):
    """What a request gets that does not say otherwise; None where the checkpoint is silent."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


class _RawGenerationConfig(Struct, frozen=True, kw_only=True):
    eos_token_id: int | list[int] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None


def read_generation_defaults(folder: str | Path) -> GenerationDefaults:
    """The defaults of the checkpoint in `folder`; the end-of-sequence ids of config.json where it names none.

    A folder without generation_config.json is fine; a broken one is a CheckpointError.
    """
    path = Path(folder) / "generation_config.json"
    raw = _RawGenerationConfig()
    if path.exists():
        try:
            raw = msgspec.convert(read_json_object(path), _RawGenerationConfig)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{path}: {error}") from error
    return GenerationDefaults(
        eos_token_ids=as_token_ids(raw.eos_token_id) or read_config(folder).eos_token_ids,
        temperature=raw.temperature,
        top_k=raw.top_k,
        top_p=raw.top_p,
    )
