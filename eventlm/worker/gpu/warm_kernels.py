"""Compiles what steps will need before a worker is ready: a kernel that is met first by a request keeps it waiting.

What is compiled lies in Triton's cache on disk, so that only the first start on a machine takes long.
"""

from __future__ import annotations

from collections.abc import Iterator

from eventlm.events.decisions import Launched
from eventlm.sampling_params import SamplingParams
from eventlm.types import OnProgress, ceil_div
from eventlm.worker.protocol import NewSequence, StepPayload
from eventlm.worker.warm_up import MeasuredRunner

#: Of its sequences; no request has it, since the seq of an arrival is never negative.
_REQUEST = -1
#: Ways to draw that have kernels of their own.
_PARAMS = (
    SamplingParams(temperature=0.0, ignore_eos=True),
    SamplingParams(temperature=1.0, top_k=10, top_p=0.9, ignore_eos=True),
    SamplingParams(temperature=0.0, presence_penalty=1.0, ignore_eos=True),
)
_PROMPT_TOKENS = 2


def warm_kernels(runner: MeasuredRunner, on_progress: OnProgress | None = None) -> None:
    """Run steps of all kinds: decodes beside a prompt, as many as make their kernels differ, drawn in all ways."""
    setup = runner.setup
    most = min(setup.max_num_seqs - 1, setup.max_num_batched_tokens - _PROMPT_TOKENS)
    kinds = [(num_decodes, params) for params in _PARAMS for num_decodes in _counts(most)]
    for number, (num_decodes, params) in enumerate(kinds, 1):
        _run(runner, num_decodes, params)
        if on_progress is not None:
            on_progress(number, len(kinds))


def _counts(most: int) -> Iterator[int]:
    """Numbers of decodes beside a prompt: none, powers of two, and the most; at all others kernels are as at these."""
    yield 0
    count = 1
    while count < most:
        yield count
        count *= 2
    if most > 0:
        yield most


def _run(runner: MeasuredRunner, num_decodes: int, params: SamplingParams) -> None:
    """A step, whose sequences share a block: what is in it does not matter here."""
    numbers = range(num_decodes + 1)
    blocks = list(range(ceil_div(_PROMPT_TOKENS, runner.setup.block_size)))
    launch = Launched(
        replica=runner.setup.replica,
        epoch=runner.setup.epoch,
        step=0,
        decodes=[(_REQUEST, index, _PROMPT_TOKENS, 0) for index in range(num_decodes)],
        chunks=[(_REQUEST, num_decodes, 0, _PROMPT_TOKENS, 1)],
        blocks=[(row, 0, blocks) for row in numbers],
        num_tokens=num_decodes + _PROMPT_TOKENS,
        predicted_ns=0,
    )
    new = [
        NewSequence(
            request=_REQUEST,
            index=index,
            token_ids=[0] * _PROMPT_TOKENS,
            num_prompt_tokens=_PROMPT_TOKENS,
            params=params,
        )
        for index in numbers
    ]
    runner.execute(launch, StepPayload(new=new))
    forget = [(_REQUEST, index) for index in numbers]
    last = Launched(
        replica=runner.setup.replica, epoch=runner.setup.epoch, step=0, forget=forget, num_tokens=0, predicted_ns=0
    )
    runner.execute(last, StepPayload())
