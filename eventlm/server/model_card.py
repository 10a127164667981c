"""What clients of Ollama and llama.cpp show of a model, in Ollama's words."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256

import msgspec
from msgspec import Struct

from eventlm.server.context import ServerContext


class ModelDetails(Struct, frozen=True, kw_only=True):
    """A model's kind. parameter_size: such as `1.7B`. quantization_level: how weights are stored, such as `BF16`."""

    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ModelCard(Struct, frozen=True, kw_only=True):
    """A model that requests may name. size: bytes of its files. digest: of this description."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails
    capabilities: list[str]


def model_card(context: ServerContext, name: str) -> ModelCard:
    """Of the served model, by one of its names."""
    return ModelCard(
        name=name,
        model=name,
        modified_at=rfc3339(context.created),
        size=context.facts.num_bytes,
        digest=digest(context, name),
        details=model_details(context),
        capabilities=capabilities(context),
    )


def model_details(context: ServerContext) -> ModelDetails:
    """Of the served model."""
    facts = context.facts
    return ModelDetails(
        format=facts.file_format,
        family=facts.family,
        families=[facts.family],
        parameter_size=_in_words(facts.num_parameters),
        quantization_level=_LEVELS.get(facts.weights, facts.weights.upper()),
    )


def capabilities(context: ServerContext) -> list[str]:
    """What the served model can be used for. Other servers that run it may refuse some of it."""
    found = ["completion", "embedding"]
    if context.forwards or context.formats.tools is not None:
        found.append("tools")
    if context.formats.reasoning is not None:
        found.append("thinking")
    return found


def digest(context: ServerContext, name: str) -> str:
    """An identity of a model as this server describes it, in hexadecimal; not the digest of a file."""
    return sha256(msgspec.json.encode([name, context.facts])).hexdigest()


def rfc3339(unix_s: int) -> str:
    """A time as Ollama writes it."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


_LEVELS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def _in_words(number: int) -> str:
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.1f}{letter}"
    return str(number)
