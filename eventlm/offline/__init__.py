"""`LLM`: batches of prompts from Python, without a server, with the interface of vLLM's class."""

from __future__ import annotations

from eventlm.offline.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from eventlm.offline.llm import LLM
from eventlm.offline.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from eventlm.sampling_params import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]
