"""What needs earlier responses, in a server that keeps none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import INVALID, RunningServer, assert_error
from tests.server.responses.responding import respond


@pytest.mark.parametrize(
    ("name", "value"), [("previous_response_id", "resp_1"), ("conversation", "conv_1"), ("background", True)]
)
def test_what_needs_kept_responses_is_refused(server: RunningServer, name: str, value: Any) -> None:
    assert_error(respond(server, **{name: value}), 400, INVALID, name, "invalid_value", "no responses are kept")
