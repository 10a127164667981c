from __future__ import annotations

from typing import Any

import pytest

from eventlm.models.facts import ModelFacts
from eventlm.server.model_card import capabilities, digest, model_details, rfc3339
from tests.server.conftest import RunningServer


@pytest.mark.parametrize(
    ("num_parameters", "size"),
    [(0, "0"), (999, "999"), (260_000, "260.0K"), (134_515_008, "134.5M"), (8_030_261_248, "8.0B")],
)
def test_sizes(server: RunningServer, num_parameters: int, size: str) -> None:
    server.context.facts = ModelFacts(16, num_parameters=num_parameters, weights="Q8_0")
    details = model_details(server.context)
    assert (details.parameter_size, details.quantization_level) == (size, "Q8_0")


def test_capabilities_are_those_of_the_parsers(start_server: Any) -> None:
    found = capabilities(start_server(tool_parser="none", reasoning_parser="deepseek_r1").context)
    assert found == ["completion", "embedding", "thinking"]


def test_a_digest_is_of_the_name_and_the_facts(server: RunningServer) -> None:
    before = digest(server.context, "a")
    assert before == digest(server.context, "a")
    assert before != digest(server.context, "b")
    server.context.facts = ModelFacts(17)
    assert before != digest(server.context, "a")


def test_times() -> None:
    assert rfc3339(1_700_000_000) == "2023-11-14T22:13:20Z"
