"""Names, calls and attributes at one position."""

from __future__ import annotations

from typing import Any

import pytest

from eventlm.replay.debugger.condition import REPLICA_ATTRIBUTES, SEQUENCE_ATTRIBUTES, STATE, Condition
from eventlm.replay.debugger.environment import PositionEnvironment, find_sequence
from eventlm.replay.debugger.session import Session
from eventlm.replay.expressions.errors import ExpressionError
from eventlm.replay.expressions.evaluation import evaluate


def value(session: Session, text: str) -> Any:
    return evaluate(Condition(text).expression, PositionEnvironment(session.core.state, {}, None, -1))


def test_every_attribute_has_a_value(session: Session) -> None:
    session.execute("goto 100")
    state = session.core.state
    sequence = state.requests[92].sequences[0]
    assert value(session, "req(92).tokens") == sequence.num_tokens
    assert value(session, "seq(92, 0).state") == sequence.state.name.lower()
    assert value(session, "seq(92, 0).live")
    for name in SEQUENCE_ATTRIBUTES:
        assert isinstance(value(session, f"req(92).{name}"), int | str), name
    for name in REPLICA_ATTRIBUTES:
        assert isinstance(value(session, f"replica(0).{name}"), int), name
    for name in STATE:
        assert isinstance(value(session, name), int | str), name


def test_one_that_is_not_live_has_none(session: Session) -> None:
    session.execute("goto 100")
    for text in ("req(4)", "req(999)", "seq(92, 7)"):
        assert value(session, f"{text}.tokens") is None
        assert value(session, f"{text}.live") is False
    assert find_sequence(session.core.state, 4, 0) is None
    assert find_sequence(session.core.state, 92, 7) is None


def test_a_replica_that_there_is_not(session: Session) -> None:
    with pytest.raises(ExpressionError, match="there is no replica 3, only 1"):
        value(session, "free < 2 or replica(3).up")
