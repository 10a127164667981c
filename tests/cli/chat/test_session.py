"""What a chat shows of an answer."""

from __future__ import annotations

import pytest

from eventlm.cli.chat import session
from eventlm.cli.chat.session import ChatAnswer
from eventlm.client.sse import StreamDelta, TokenUsage

SECOND = 1_000_000_000


def answered(monkeypatch: pytest.MonkeyPatch, times_ns: list[int], usage: TokenUsage | None) -> ChatAnswer:
    """An answer to a message of time 0 with a piece at each of the times."""
    monkeypatch.setattr(session.time, "monotonic_ns", lambda: 0)
    answer = ChatAnswer()
    for ns in times_ns:
        answer.add(StreamDelta(0, "a", None, None, ns))
    answer.add(StreamDelta(0, "", "stop", usage, times_ns[-1] + SECOND))
    return answer


def test_a_summary_says_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = answered(monkeypatch, [SECOND // 4, SECOND, 9 * SECOND // 4], TokenUsage(1223, 11, 1234))
    assert whole.summary(8192) == "11 tokens, 5.0 tokens/s, first after 0.25 s, context 1,234 of 8,192"
    assert whole.summary(0).endswith("context 1,234")
    stopped = answered(monkeypatch, [SECOND, 2 * SECOND], None)
    assert stopped.summary(8192) == "2 tokens, 1.0 tokens/s, first after 1.00 s"
    short = answered(monkeypatch, [SECOND // 2], None)
    assert short.summary(0) == "1 token, first after 0.50 s"
