"""Launch events for tests of a worker: says which blocks, chunks and decodes, without the core."""

from __future__ import annotations

from eventlm.events.decisions import Launched
from eventlm.sampling_params import SamplingParams
from eventlm.types import RequestKind
from eventlm.worker.protocol import NewSequence, StepPayload

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def new_sequence(
    request: int,
    token_ids: list[int],
    *,
    index: int = 0,
    num_prompt_tokens: int | None = None,
    params: SamplingParams = GREEDY,
    kind: RequestKind = "generate",
) -> NewSequence:
    """A sequence with its history; all of it is the prompt unless `num_prompt_tokens` says otherwise."""
    return NewSequence(
        request=request,
        index=index,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        params=params,
        kind=kind,
    )


def launched(
    step: int,
    *,
    decodes: list[tuple[int, int, int, int]] | None = None,
    chunks: list[tuple[int, int, int, int, int]] | None = None,
    blocks: list[tuple[int, int, list[int]]] | None = None,
    forget: list[tuple[int, int]] | None = None,
    states: list[tuple[int, int, int, list[tuple[int, int]]]] | None = None,
) -> Launched:
    """A launch of replica 0, epoch 1."""
    return Launched(
        replica=0,
        epoch=1,
        step=step,
        decodes=decodes or [],
        chunks=chunks or [],
        blocks=blocks or [],
        forget=forget or [],
        num_tokens=len(decodes or []) + sum(chunk[3] for chunk in chunks or []),
        predicted_ns=0,
        states=states or [],
    )


def payload(*new: NewSequence) -> StepPayload:
    """What travels beside a launch."""
    return StepPayload(new=list(new))
