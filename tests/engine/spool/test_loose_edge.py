from __future__ import annotations

from typing import Any

from eventlm.engine.request import TokensOutput
from eventlm.engine.spool.loose_edge import LooseEdge


def test_outputs_go_to_the_adopter() -> None:
    edge = LooseEdge()
    first, second = edge.puts(2)
    first(TokensOutput(0, 0, [1]))
    taken: list[tuple[int, Any]] = []
    edge.on_output = lambda index, output: taken.append((index, output))
    second(TokensOutput(0, 0, [2]))
    first(TokensOutput(0, 1, [3]))
    assert taken == [(1, TokensOutput(0, 0, [2])), (0, TokensOutput(0, 1, [3]))]
