"""The collector: pieces of outputs become whole ones, whatever order they come in."""

from __future__ import annotations

import math
import struct

import pytest

from eventlm.engine.request import EngineUnavailableError, FinishedOutput, Request
from eventlm.errors import EventLMError
from eventlm.offline.collector import Collector
from eventlm.offline.outputs import EmbeddingRequestOutput, Logprob, RequestOutput
from eventlm.offline.prompts import Prompt
from eventlm.sampling_params import SamplingParams, TokenLogprobs
from eventlm.scheduling_params import SchedulingParams
from eventlm.text.choice_output import ChoiceOutput
from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.types import FinishReason, RequestKind


def collector(*requests: Request) -> Collector:
    prompts = [Prompt(f"prompts[{index}]", "ab", request.prompt_token_ids) for index, request in enumerate(requests)]
    return Collector(prompts, requests, [f"{index}" for index in range(len(requests))], FakeTokenizer())


def request(n: int = 1, kind: RequestKind = "generate", **params: int) -> Request:
    return Request(
        prompt_token_ids=[97, 98, 256],
        sampling=SamplingParams(n=n, **params),
        scheduling=SchedulingParams(model="m", kind=kind),
    )


def end(choice: int, *, reason: FinishReason = "length", stop_reason: str | int | None = None) -> ChoiceOutput:
    return ChoiceOutput(choice, finished=FinishedOutput(0, reason, 2, 16), stop_reason=stop_reason)


def logprobs(*tokens: tuple[float, int, dict[int, float]]) -> TokenLogprobs:
    return TokenLogprobs(
        logprobs=[logprob for logprob, _, _ in tokens],
        ranks=[rank for _, rank, _ in tokens],
        top_ids=[list(top) for _, _, top in tokens],
        top_logprobs=[list(top.values()) for _, _, top in tokens],
    )


def test_a_request_is_whole_with_its_last_choice() -> None:
    found = collector(request(), request(n=2))
    pieces = [
        ChoiceOutput(2, "b", [98]),
        ChoiceOutput(1, "a", [97]),
        end(2, reason="stop", stop_reason="x"),
        ChoiceOutput(0, "", [99]),
        ChoiceOutput(1, "A", [65]),
        end(1, reason="eos"),
    ]
    *nothing, (index, output) = [found.add(piece) or (-1, None) for piece in pieces]
    assert nothing == [(-1, None)] * 5
    assert index == 1
    assert isinstance(output, RequestOutput)
    assert [(each.index, each.text, each.token_ids) for each in output.outputs] == [(0, "aA", [97, 65]), (1, "b", [98])]
    assert [(each.finish_reason, each.stop_reason) for each in output.outputs] == [("stop", None), ("stop", "x")]
    assert (output.request_id, output.num_cached_tokens, output.prompt) == ("1", 16, "ab")
    assert output.metrics is not None
    assert output.metrics.first_token_time is not None
    assert output.metrics.arrival_time <= output.metrics.first_token_time <= output.metrics.finished_time


def test_log_probabilities_are_dicts_by_token() -> None:
    found = collector(request(logprobs=2, prompt_logprobs=1))
    found.add(ChoiceOutput(0, prompt_logprobs=logprobs((-1.0, 1, {98: -1.0}))))
    found.add(ChoiceOutput(0, prompt_logprobs=logprobs((-3.0, 7, {97: -0.5}))))
    found.add(ChoiceOutput(0, "a", [97], logprobs((-0.25, 1, {97: -0.25, 98: -2.0}))))
    found.add(ChoiceOutput(0, "b", [98, 257], logprobs((-4.0, 9, {97: -0.5, 99: -1.5}), (-1.0, 2, {1: -0.5, 257: -1}))))
    whole = found.add(end(0))
    assert whole is not None
    output = whole[1]
    assert isinstance(output, RequestOutput)
    assert output.prompt_logprobs == [
        None,
        {98: Logprob(-1.0, 1, "b")},
        {256: Logprob(-3.0, 7, "<|bos|>"), 97: Logprob(-0.5, 1, "a")},
    ]
    [completion] = output.outputs
    assert completion.logprobs == [
        {97: Logprob(-0.25, 1, "a"), 98: Logprob(-2.0, 2, "b")},
        {98: Logprob(-4.0, 9, "b"), 97: Logprob(-0.5, 1, "a"), 99: Logprob(-1.5, 2, "c")},
        {257: Logprob(-1.0, 2, "<|eos|>"), 1: Logprob(-0.5, 1, "\x01")},
    ]
    # The token itself comes first.
    assert [next(iter(each)) for each in completion.logprobs] == completion.token_ids
    assert completion.cumulative_logprob == -5.25


def test_named_tokens_have_no_rank() -> None:
    found = collector(request(logprob_token_ids=[99, 97]))
    found.add(ChoiceOutput(0, "a", [97], logprobs((-0.25, 1, {99: -7.0, 97: -0.25}))))
    whole = found.add(end(0))
    assert whole is not None
    assert isinstance(whole[1], RequestOutput)
    assert whole[1].outputs[0].logprobs == [{97: Logprob(-0.25, 1, "a"), 99: Logprob(-7.0, None, "c")}]


def test_an_embedding_has_length_one() -> None:
    found = collector(request(kind="pool"))
    found.add(ChoiceOutput(0, embedding=struct.pack("<3f", 3.0, 0.0, -4.0)))
    whole = found.add(end(0, reason="complete"))
    assert whole is not None
    assert isinstance(whole[1], EmbeddingRequestOutput)
    assert whole[1].outputs.embedding == [0.6, 0.0, -0.8]
    assert whole[1].outputs.hidden_size == 3
    assert math.hypot(*whole[1].outputs.embedding) == 1.0


@pytest.mark.parametrize(
    ("reason", "error", "message"),
    [
        ("cancelled", EngineUnavailableError, "this LLM was shut down while it worked"),
        ("error", EventLMError, r"prompts\[0\] could not be completed\. Each worker"),
    ],
)
def test_an_end_that_is_an_error(reason: FinishReason, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        collector(request()).add(end(0, reason=reason))
