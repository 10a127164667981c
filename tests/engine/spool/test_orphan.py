from __future__ import annotations

from typing import Any

from eventlm.engine.request import TokensOutput
from eventlm.engine.spool.orphan import Orphan


def test_outputs_go_to_the_adopter() -> None:
    orphan = Orphan()
    first, second = orphan.puts(2)
    first(TokensOutput(0, 0, [1]))
    taken: list[tuple[int, Any]] = []
    orphan.on_output = lambda index, output: taken.append((index, output))
    second(TokensOutput(0, 0, [2]))
    first(TokensOutput(0, 1, [3]))
    assert taken == [(1, TokensOutput(0, 0, [2])), (0, TokensOutput(0, 1, [3]))]
