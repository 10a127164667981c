"""`SamplingParams`: vLLM's names and defaults, and one clear line for each mistake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import eventlm
from eventlm import SamplingParams
from eventlm.errors import InputError

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
    "logprob_token_ids": None,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "structured_outputs": None,
    "guided_decoding": None,
}


def test_names_and_defaults_are_vllms() -> None:
    assert {name: getattr(SamplingParams(), name) for name in VLLM_DEFAULTS} == VLLM_DEFAULTS
    assert [field.name for field in structs.fields(SamplingParams)][:-4] == list(VLLM_DEFAULTS)


def test_values_are_brought_into_form() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[3, 3, 1], bad_words=None, seed=-1, logprobs=True)
    assert (params.stop, params.stop_token_ids, params.bad_words) == (["x"], [3, 1], [])
    assert (params.seed, params.logprobs) == (None, 1)


@pytest.mark.parametrize(
    ("field", "value", "code", "param"),
    [
        ("n", 0, "invalid_value", "n"),
        ("n", 10**7, "invalid_value", "n"),
        ("n", 2.0, "invalid_type", "n"),
        ("n", True, "invalid_type", "n"),
        ("presence_penalty", 2.5, "invalid_value", "presence_penalty"),
        ("frequency_penalty", -3, "invalid_value", "frequency_penalty"),
        ("repetition_penalty", 0, "invalid_value", "repetition_penalty"),
        ("repetition_penalty", 1e-30, "invalid_value", "repetition_penalty"),
        ("repetition_penalty", float("inf"), "invalid_value", "repetition_penalty"),
        ("temperature", -0.1, "invalid_value", "temperature"),
        ("temperature", float("nan"), "invalid_value", "temperature"),
        ("temperature", "hot", "invalid_type", "temperature"),
        ("top_p", 0, "invalid_value", "top_p"),
        ("top_p", 1.01, "invalid_value", "top_p"),
        ("top_k", -2, "invalid_value", "top_k"),
        ("min_p", 2, "invalid_value", "min_p"),
        ("seed", 2**64, "invalid_value", "seed"),
        ("seed", "x", "invalid_type", "seed"),
        ("stop", [""], "invalid_value", "stop[0]"),
        ("stop", ["a", 3], "invalid_type", "stop[1]"),
        ("stop", [["a"]], "invalid_type", "stop[0]"),
        ("stop_token_ids", {None}, "invalid_type", "stop_token_ids[0]"),
        ("stop", 7, "invalid_type", "stop"),
        ("bad_words", "word", "invalid_type", "bad_words"),
        ("bad_words", [" ok", "a\ud800"], "invalid_value", "bad_words[1]"),
        ("bad_words", [" ok", ""], "invalid_value", "bad_words[1]"),
        ("stop_token_ids", [1, -1], "invalid_value", "stop_token_ids[1]"),
        ("stop_token_ids", ["1"], "invalid_type", "stop_token_ids[0]"),
        ("max_tokens", 0, "invalid_value", "max_tokens"),
        ("min_tokens", -1, "invalid_value", "min_tokens"),
        ("min_tokens", 17, "invalid_value", "min_tokens"),
        ("logprobs", -2, "invalid_value", "logprobs"),
        ("prompt_logprobs", 0.5, "invalid_type", "prompt_logprobs"),
        ("allowed_token_ids", [], "invalid_value", "allowed_token_ids"),
        ("allowed_token_ids", "ab", "invalid_type", "allowed_token_ids"),
        ("logit_bias", [(1, 2)], "invalid_type", "logit_bias"),
        ("logit_bias", {"1": 2.0}, "invalid_type", "logit_bias"),
        ("logit_bias", {1: 101}, "invalid_value", "logit_bias"),
        ("ignore_eos", 1, "invalid_type", "ignore_eos"),
        ("skip_special_tokens", None, "invalid_type", "skip_special_tokens"),
        ("structured_outputs", "json", "invalid_type", "structured_outputs"),
        ("structured_outputs", {"regexp": "a"}, "invalid_value", "structured_outputs"),
    ],
)
def test_each_mistake_is_named(field: str, value: Any, code: str, param: str) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**{field: value})
    assert (caught.value.param, caught.value.code) == (param, code)
    assert param in str(caught.value)
    assert "\n" not in str(caught.value)
    # What code that was written for vLLM expects.
    assert isinstance(caught.value, ValueError)


def test_a_value_out_of_range_is_shown() -> None:
    with pytest.raises(InputError, match=r"2\.0, got 2\.5"):
        SamplingParams(temperature=2.5)


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


FILES_OF_A_PARAMETER = {
    "eventlm/models/gguf/tokenizer_json.py",
    "eventlm/sampling_params.py",
    "eventlm/text/beam_search/fields.py",
    "eventlm/text/generation_config.py",
    "eventlm/worker/sampling/sampling_table.py",
}


APIS_OF_OTHERS = tuple(f"eventlm/server/{name}/" for name in ("anthropic", "llamacpp", "ollama"))


def test_a_new_parameter_touches_few_files() -> None:
    """Where `min_p` is named: its definition, the models' recommendations, what beam search refuses, and the table that
    workers sample by.

    The kernels that sample have it under the name `log_min_p`, and the command line has a flag.
    """
    root = Path(eventlm.__file__).parent
    named = {
        f"eventlm/{path.relative_to(root)}"
        for path in root.rglob("*.py")
        if re.search(r"(?<![A-Za-z_])min_p(?![A-Za-z_])", path.read_text())
    }
    # The APIs of other servers list their own parameters.
    others = {name for name in named if name.startswith(APIS_OF_OTHERS)}
    assert named - others - {"eventlm/cli/request_flags.py"} == FILES_OF_A_PARAMETER
