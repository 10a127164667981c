"""eventlm: a large-language-model inference engine that can be rewound.

from eventlm import LLM, SamplingParams

llm = LLM("smollm2")
[output] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
print(output.outputs[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eventlm._version import __version__

if TYPE_CHECKING:
    from eventlm.offline import (
        LLM,
        BeamSearchOutput,
        BeamSearchParams,
        BeamSearchSequence,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestOutput,
        SamplingParams,
        StructuredOutputsParams,
    )

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Load the offline API when it is first asked for: workers and the command line need not pay for it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("eventlm.offline"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
