from __future__ import annotations

import pytest
from msgspec import structs

from eventlm.engine.request import Request
from eventlm.errors import InputError, InvalidTypeError, PromptTooLongError, UnknownModelError
from eventlm.sampling_params import SamplingParams
from eventlm.scheduling_params import SchedulingParams
from eventlm.server.translation import limited, native_fields

NAMES = {"messages": "input", "response_format.json_schema.schema": "format", "response_format": "shape", "n": "count"}


@pytest.mark.parametrize(
    ("param", "named"),
    [
        ("messages", "input"),
        ("messages[1].role", "input[1].role"),
        ("response_format.json_schema.schema.properties.a", "format.properties.a"),
        ("response_format.type", "shape.type"),
        ("n", "count"),
        # Only whole names count.
        ("name", "name"),
        ("other.messages", "other.messages"),
        (None, None),
    ],
)
def test_fields_have_their_native_names(param: str | None, named: str | None) -> None:
    with pytest.raises(InputError) as raised, native_fields(NAMES):
        raise InvalidTypeError(param, f"Invalid type for '{param}': {param} must be a string, see 'other'.")
    assert (raised.value.param, raised.value.code) == (named, "invalid_type")
    assert str(raised.value) == f"Invalid type for '{named}': {named} must be a string, see 'other'."


def test_every_name_in_an_error_is_native_and_the_error_is_of_the_same_kind() -> None:
    with (
        pytest.raises(PromptTooLongError) as raised,
        native_fields({"messages": "input", r"tools\[(\d+)\].x": r"t[\1]"}),
    ):
        raise PromptTooLongError(
            "messages", "'messages' and 'tools[7].x.y' exclude 'name'; shorten the messages.", 12, 10
        )
    assert str(raised.value) == "'input' and 't[7].y' exclude 'name'; shorten the input."
    error = raised.value
    assert (error.param, error.args[0], error.num_tokens, error.most_tokens) == ("input", "input", 12, 10)
    assert error.code == "context_length_exceeded"


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(UnknownModelError), native_fields(NAMES):
        raise UnknownModelError("x")


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 10), (3, 3), (10, 10), (99, 10)])
def test_limits_are_cut_to_the_context(max_tokens: int | None, expected: int) -> None:
    request = Request(
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=10, top_k=3),
        scheduling=SchedulingParams(model="test"),
    )
    found = limited(request, max_tokens)
    assert found.max_tokens == expected
    assert structs.replace(found, sampling=request.sampling) == request
    assert found.sampling.top_k == 3
