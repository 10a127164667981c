"""`SamplingParams`: vLLM's names and defaults, and one clear line for each mistake."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from eventlm import SamplingParams
from eventlm.errors import UsageError

#: Of vllm.SamplingParams (vllm/sampling_params.py, 2025): what this engine has of it, with vLLM's own defaults, which
#: vLLM writes down as None for the lists and then turns into empty ones.
VLLM_DEFAULTS = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "structured_outputs": None,
    "guided_decoding": None,
}


def test_names_and_defaults_are_vllms() -> None:
    assert dataclasses.asdict(SamplingParams()) == VLLM_DEFAULTS


def test_values_are_brought_into_form() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[3, 3, 1], bad_words=None, seed=-1, logprobs=True)
    assert (params.stop, params.stop_token_ids, params.bad_words) == (["x"], [3, 1], [])
    assert (params.seed, params.logprobs) == (None, 1)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", 0, "n must be from 1 to 16384, got 0"),
        ("n", 10**7, "n must be from 1 to 16384, got 10000000"),
        ("n", 2.0, "n must be an integer, got 2.0"),
        ("n", True, "n must be an integer, got True"),
        ("presence_penalty", 2.5, "presence_penalty must be a number at least -2 and at most 2, got 2.5"),
        ("frequency_penalty", -3, "frequency_penalty must be a number at least -2 and at most 2, got -3"),
        ("repetition_penalty", 0, "repetition_penalty must be a number at least 0.001 and at most 1000, got 0"),
        ("repetition_penalty", 1e-30, "repetition_penalty must be a number at least 0.001 and at most 1000, got 1e-30"),
        (
            "repetition_penalty",
            float("inf"),
            "repetition_penalty must be a number at least 0.001 and at most 1000, got",
        ),
        ("temperature", -0.1, "temperature must be a number at least 0 and at most 2, got -0.1"),
        ("temperature", float("nan"), "temperature must be a number at least 0 and at most 2, got nan"),
        ("temperature", "hot", "temperature must be a number, got 'hot'"),
        ("top_p", 0, "top_p must be a number above 0 and at most 1, got 0"),
        ("top_p", 1.01, "top_p must be a number above 0 and at most 1, got 1.01"),
        ("top_k", -2, "top_k must be at least -1, got -2"),
        ("min_p", 2, "min_p must be a number at least 0 and at most 1, got 2"),
        ("seed", 2**64, "seed must be from"),
        ("seed", "x", "seed must be an integer, got 'x'"),
        ("stop", [""], "stop[0] must be a string that is not empty, got ''"),
        ("stop", ["a", 3], "stop[1] must be a string that is not empty, got 3"),
        ("stop", [["a"]], "stop[0] must be a string that is not empty, got ['a']"),
        ("stop_token_ids", {None, 3}, "stop_token_ids["),
        ("stop", 7, "stop must be a list, got 7"),
        ("bad_words", "word", "bad_words must be a list, got 'word'"),
        ("bad_words", [" ok", "a\ud800"], "bad_words[1] is not valid text: it has a lone surrogate at 1"),
        ("bad_words", [" ok", ""], "bad_words[1] must be a string that is not empty"),
        ("stop_token_ids", [1, -1], "stop_token_ids[1] must be at least 0, got -1"),
        ("stop_token_ids", ["1"], "stop_token_ids[0] must be an integer, got '1'"),
        ("max_tokens", 0, "max_tokens must be at least 1, got 0"),
        ("min_tokens", -1, "min_tokens must be at least 0, got -1"),
        ("min_tokens", 17, "min_tokens is 17, more than max_tokens, which is 16"),
        ("logprobs", -2, "logprobs must be at least -1, got -2"),
        ("prompt_logprobs", 0.5, "prompt_logprobs must be an integer, got 0.5"),
        ("allowed_token_ids", [], "allowed_token_ids is empty"),
        ("allowed_token_ids", "ab", "allowed_token_ids must be a list of token ids, got 'ab'"),
        ("logit_bias", [(1, 2)], "logit_bias must be a dict"),
        ("logit_bias", {"1": 2.0}, "a key of logit_bias must be an integer, got '1'"),
        ("logit_bias", {1: 101}, "logit_bias[1] must be a number at least -100 and at most 100, got 101"),
        ("ignore_eos", 1, "ignore_eos must be True or False, got 1"),
        ("skip_special_tokens", None, "skip_special_tokens must be True or False, got None"),
    ],
)
def test_each_mistake_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    # What code that was written for vLLM expects.
    assert isinstance(caught.value, ValueError)


def test_greedy_has_one_completion() -> None:
    with pytest.raises(ValueError, match="n is 2 at temperature 0"):
        SamplingParams(n=2, temperature=0)


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(TypeError, match="beam_width"):
        SamplingParams(beam_width=4)  # type: ignore[call-arg]


def test_an_assigned_value_is_checked_at_its_use() -> None:
    params = SamplingParams()
    params.stop = "end"
    params.check()
    assert params.stop == ["end"]
    params.top_p = 3
    with pytest.raises(ValueError, match="top_p"):
        params.check()
