"""Bodies that ask for a beam search: what they get, and which fields cannot stand beside it."""

from __future__ import annotations

from typing import Any

import pytest

from eventlm.engine.request import BeamSettings
from eventlm.text.beam_search.search import BRANCH_TOKENS
from tests.server.conftest import INVALID, RunningServer, assert_error

SEARCH: dict[str, Any] = {"use_beam_search": True, "n": 2, "max_tokens": 4}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stream": True}, "stream"),
    ({"stop": ["x"]}, "stop"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"repetition_penalty": 1.5}, "repetition_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"allowed_token_ids": [5]}, "allowed_token_ids"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"response_format": {"type": "json_object"}}, "use_beam_search"),
    ({"beam_width": 1}, "beam_width"),
    ({"beam_width": 129}, "beam_width"),
    ({"length_penalty": 11}, "length_penalty"),
    ({"use_beam_search": False, "beam_width": 2}, "beam_width"),
    ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_fields_that_a_search_does_not_follow(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    for send in (server.chat, server.complete):
        assert_error(send(**(SEARCH | fields)), 400, INVALID, param=param, code="invalid_value")
    assert server.engine.num_groups == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1}, "best_of"),
        ({"best_of": 3, "beam_width": 4}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"logprobs": 1, "logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"echo": True, "max_tokens": 0}, "echo"),
        ({"prompt": ["x"] * 1000, "beam_width": 3}, "prompt"),
    ],
)
def test_fields_of_completions(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    assert_error(server.complete(**(SEARCH | fields)), 400, INVALID, param=param, code="invalid_value")


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({}, BeamSettings(2)),
        ({"beam_width": 5}, BeamSettings(5)),
        ({"best_of": 3, "length_penalty": 0.5}, BeamSettings(3, 0.5)),
        # They are for draws.
        ({"temperature": 1.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 1, "stream": False}, BeamSettings(2)),
    ],
)
def test_the_width_and_the_choices(server: RunningServer, fields: dict[str, Any], settings: BeamSettings) -> None:
    reply = server.complete(**(SEARCH | fields), logprobs=1, return_token_ids=True).json()
    # The engine double finds the tokens from 32 on the likeliest ones at every place, and the model's end nowhere.
    first, second = reply["choices"]
    assert (first["index"], first["token_ids"], first["text"], first["finish_reason"]) == (
        0,
        [32] * 4,
        " " * 4,
        "length",
    )
    assert sorted(second["token_ids"]) == [32, 32, 32, 33]
    assert first["logprobs"]["token_logprobs"] == pytest.approx([-0.32] * 4)
    assert reply["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 4},
    }  # fmt: skip
    root = server.engine.requests[0]
    assert root.sampling.logprobs == settings.width + 1
    assert (root.sampling.temperature, root.sampling.max_tokens) == (0, min(BRANCH_TOKENS, 4))
    assert all(request.beams is None for request in server.engine.requests)


def test_a_chat(server: RunningServer) -> None:
    reply = server.chat(**SEARCH, logprobs=True, top_logprobs=2, eventlm={"timings": True}).json()
    assert reply["choices"][0]["message"]["content"] == "    "
    [entry, *_] = reply["choices"][0]["logprobs"]["content"]
    assert (entry["token"], len(entry["top_logprobs"])) == (" ", 2)
    assert reply["usage"]["completion_tokens"] == 8


def test_a_chat_has_another_name_for_the_width(server: RunningServer) -> None:
    reply = server.chat(**SEARCH, best_of=4)
    assert_error(reply, 400, INVALID, param="best_of", code="invalid_value", message="number of beams in 'beam_width'")


def test_each_prompt_is_searched(server: RunningServer) -> None:
    reply = server.complete(**SEARCH, prompt=["a", "b", "c"], return_token_ids=True, echo=True).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [choice["text"][0] for choice in reply["choices"]] == ["a", "a", "b", "b", "c", "c"]
    assert server.engine.requests[0].prompt_token_ids != server.engine.requests[1].prompt_token_ids
