"""Sampling parameters by name."""

from __future__ import annotations

from typing import Any

import pytest

from eventlm.cli.chat.settings import check_settings, parse_setting, settings, shown
from eventlm.errors import UsageError


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.2", 0.2),
        ("temperature", "0", 0),
        ("max_tokens", "9", 9),
        ("ignore_eos", "true", True),
        ("stop", "END", "END"),
        ("stop", "5", "5"),
        ("stop", '["a", "b"]', ["a", "b"]),
        ("stop_token_ids", "[1, 2]", [1, 2]),
        ("slo", '{"ttft_ms": 5}', {"ttft_ms": 5}),
        ("seed", "null", None),
    ],
)
def test_a_value_is_json_or_a_bare_string(name: str, text: str, value: Any) -> None:
    parsed = parse_setting(name, text)
    assert parsed == value
    assert parse_setting(name, shown(parsed)) == value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("temprature", "1", "unknown parameter 'temprature'; did you mean temperature?"),
        ("zzz", "1", "unknown parameter 'zzz'; known: "),
        ("stream", "true", "unknown parameter 'stream'"),
        ("temperature", "hot", "temperature: expected `float | null`, got `str`"),
        ("temperature", "3", "temperature: expected `float` <= 2.0"),
        ("max_tokens", "1.5", "max_tokens: expected `int | null`, got `float`"),
    ],
)
def test_mistakes(name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_setting(name, text)
    assert message in str(caught.value)


def test_the_fields_of_a_body_that_are_no_parameters_are_passed_over() -> None:
    assert check_settings({"stream": True, "n": 2, "top_p": 0.5}) == {"top_p": 0.5}
    with pytest.raises(UsageError, match="unknown parameter 'top_q'; did you mean top_p"):
        check_settings({"top_q": 0.5})
    assert {"temperature", "top_k", "seed", "stop", "max_completion_tokens"} <= set(settings())
