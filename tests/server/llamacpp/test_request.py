"""What bodies of `/completion` ask of the engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import INVALID, RunningServer, assert_error


def complete(server: RunningServer, **fields: Any) -> Any:
    return server.post("/completion", {"prompt": "hi", **fields})


@pytest.mark.parametrize(
    ("prompt", "expected", "is_list"),
    [
        ("ab", [[256, 97, 98]], False),
        ([97, 98], [[97, 98]], False),
        # Only a text at the start gets the tokenizer's special tokens.
        ([97, "b", 99, "d"], [[97, 98, 99, 100]], False),
        (["b", 99], [[256, 98, 99]], False),
        ({"prompt_string": "a"}, [[256, 97]], False),
        ({"prompt_string": "a", "multimodal_data": []}, [[256, 97]], False),
        (["a", "b"], [[256, 97], [256, 98]], True),
        (["a"], [[256, 97]], False),
        (["a", [98, "c"], {"prompt_string": "d"}], [[256, 97], [98, 99], [256, 100]], True),
        ([[97], [98, 99]], [[97], [98, 99]], True),
    ],
)
def test_forms_of_a_prompt(server: RunningServer, prompt: Any, expected: list[list[int]], is_list: bool) -> None:
    reply = complete(server, prompt=prompt).json()
    assert [request.prompt_token_ids for request in server.engine.requests] == expected
    assert isinstance(reply, list) == is_list


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"max_tokens": 253, "temperature": 1.0}),
        ({"n_predict": -1}, {"max_tokens": 253}),
        ({"n_predict": 5}, {"max_tokens": 5}),
        ({"n_predict": 5.0}, {"max_tokens": 5}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"n_predict": 6, "max_tokens": 5}, {"max_tokens": 6}),
        # What the context has no room for is no error.
        ({"n_predict": 2**40}, {"max_tokens": 253}),
        ({"temperature": -1}, {"temperature": 0.0}),
        ({"temperature": 3}, {"temperature": 2.0}),
        ({"repeat_penalty": 0}, {"repetition_penalty": 1.0}),
        ({"repeat_penalty": 5000}, {"repetition_penalty": 1000.0}),
        ({"n_probs": 30}, {"logprobs": 20}),
        ({"top_k": -5}, {"top_k": 0}),
        ({"top_k": 7, "top_p": 0.5, "min_p": 0.1}, {"top_k": 7, "top_p": 0.5, "min_p": 0.1}),
        ({"top_p": 0}, {"top_p": 1e-9}),
        ({"top_p": 1.5}, {"top_p": 1.0}),
        ({"seed": -1}, {"seed": None}),
        ({"seed": 2**32 - 1}, {"seed": None}),
        ({"seed": 7}, {"seed": 7}),
        ({"stop": ["a", ""]}, {"stop": ["a"]}),
        ({"stop": "a"}, {"stop": ["a"]}),
        ({"repeat_penalty": 1.5, "presence_penalty": 1}, {"repetition_penalty": 1.5, "presence_penalty": 1.0}),
        ({"repeat_penalty": 1.5, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
        ({"repeat_penalty": 1.5, "samplers": ["top_k"]}, {"repetition_penalty": 1.0}),
        ({"top_p": 0.5, "top_k": 3, "samplers": ["dry", "top_k", "xtc"]}, {"top_p": 1.0, "top_k": 3}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"n_probs": 3}, {"logprobs": 3}),
        ({"n_probs": 0}, {"logprobs": None}),
        ({"n_cmpl": 2}, {"n": 2}),
        ({"logit_bias": [[5, 1.5], ["ab", -1]]}, {"logit_bias": {5: 1.5, 97: -1.0, 98: -1.0}}),
        ({"logit_bias": {"5": 1.5, "a": 1e9}}, {"logit_bias": {5: 1.5, 97: 100.0}}),
        ({"logit_bias": [[5, False], ["a", False]]}, {"bad_words_token_ids": ((5,), (97,)), "logit_bias": None}),
        ({"logit_bias": [[5, False]] * 1024}, {"bad_words_token_ids": ((5,),)}),
        ({"grammar": ""}, {"grammar": ""}),
    ],
)
def test_a_field(server: RunningServer, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    reply = complete(server, **fields)
    assert reply.status == 200, reply.data
    params = server.engine.requests[0].sampling
    assert {name: getattr(params, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"grammar": 'root ::= "yes" | "no"'}, "yes"),
        ({"json_schema": {"type": "integer"}}, "integer"),
        ({"json_schema": {}}, "json_schema"),
        ({"json_schema": True}, "json_schema"),
    ],
)
def test_structures(server: RunningServer, fields: dict[str, Any], part: str) -> None:
    settings = complete(server, **fields).json()["generation_settings"]
    assert part in server.engine.requests[0].sampling.grammar
    assert settings["grammar"] == fields.get("grammar", server.engine.requests[0].sampling.grammar)


@pytest.mark.parametrize(("cache_prompt", "skips"), [(None, False), (True, False), (False, True)])
def test_the_prefix_cache_can_be_left_out(server: RunningServer, cache_prompt: bool | None, skips: bool) -> None:
    complete(server, cache_prompt=cache_prompt)
    assert server.engine.requests[0].scheduling.skip_cache_read == skips


def test_parameters_with_neutral_values(server: RunningServer) -> None:
    neutral = {
        "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "typical_p": 1.0, "xtc_probability": 0.0, "mirostat": 0,
        "xtc_threshold": 0.1, "dry_multiplier": 0.0, "dry_base": 1.75, "mirostat_tau": 5.0, "min_keep": 0, "lora": [],
        "t_max_predict_ms": 0, "post_sampling_probs": False, "n_indent": 0, "n_keep": 4, "id_slot": 1,
        "return_progress": True, "timings_per_token": True,
    }  # fmt: skip
    assert complete(server, **neutral).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": ["a", []]}, "prompt[1]"),
        ({"prompt": [1, 1024]}, "prompt[1]"),
        ({"prompt": ["a", [1, 1024]]}, "prompt[1][1]"),
        ({"prompt": [1, [2]]}, "prompt[1]"),
        ({"prompt": [1, -2]}, "prompt[1]"),
        ({"prompt": [1, {"prompt_string": "a"}]}, "prompt[1]"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}}, "prompt.multimodal_data"),
        ({"prompt": "a" * 300}, "prompt"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"n_cmpl": 0}, "n_cmpl"),
        ({"n_probs": -1}, "n_probs"),
        ({"samplers": ["top_k", "best"]}, "samplers[1]"),
        ({"logit_bias": [[1024, 1]]}, "logit_bias"),
        ({"logit_bias": [[1, True]]}, "logit_bias"),
        ({"logit_bias": [[1]]}, "logit_bias[0]"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"json_schema": {"type": "strinx"}}, "json_schema"),
        ({"json_schema": {"properties": {"a": {"type": 7}}}}, "json_schema.properties.a"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar"),
        ({"mirostat": 2}, "mirostat"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
        ({"typical_p": 0.7}, "typical_p"),
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"lora": [{"id": 0, "scale": 1.0}]}, "lora"),
    ],
)
def test_what_is_wrong_is_named(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    reply = complete(server, **fields)
    error = reply.json()["error"]
    assert (reply.status, error["type"], error["param"]) == (400, INVALID, param), error
    assert param.partition("[")[0] in error["message"]


@pytest.mark.parametrize(
    ("biases", "words"),
    [
        ([[5, False]] * 1025, "at most 1024 pairs are allowed"),
        ([[5, 1]] * 1025, "at most 1024 pairs are allowed"),
        ({str(token_id): 1 for token_id in range(1025)}, "at most 1024 pairs are allowed"),
        ([[token_id, False] for token_id in range(257)], "at most 256 tokens can be banned"),
    ],
)
def test_most_biases(server: RunningServer, biases: Any, words: str) -> None:
    reply = complete(server, logit_bias=biases)
    assert_error(reply, 400, INVALID, "logit_bias", "invalid_value", words)


def test_another_model(server: RunningServer) -> None:
    assert_error(complete(server, model="other"), 404, INVALID, "model", "model_not_found")
    assert complete(server, model="org/test").json()["model"] == "org/test"


def test_scheduling(server: RunningServer) -> None:
    complete(server, priority=3, deadline_ms=50, prompt=["a", "b"])
    found = [request.scheduling for request in server.engine.requests]
    assert [(each.priority, each.deadline_ns) for each in found] == [(3, 50_000_000)] * 2
