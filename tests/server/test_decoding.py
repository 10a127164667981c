"""What the errors of fields say that are one of several words."""

from __future__ import annotations

import pytest

from .conftest import INVALID, RunningServer, assert_error


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (
            "/v1/embeddings",
            {"input": "x", "encoding_format": "hex"},
            "'encoding_format': supported values are 'base64', 'float'.",
        ),
        ("/v1/embeddings", {"input": "x", "pooling": "max"}, "'pooling': supported values are 'last', 'mean'."),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "utmost"},
            "supported values are 'high', 'low', 'medium', 'minimal', 'none', 'xhigh'.",
        ),
    ],
)
def test_the_words_that_can_be_used_are_named(server: RunningServer, path: str, fields: dict, message: str) -> None:
    reply = server.post(path, {"model": "test", **fields})
    assert_error(reply, 400, INVALID, list(fields)[-1], "invalid_value", message=message)
