"""What a streamed token costs in each API."""

from __future__ import annotations

import sys

import pytest

from benchmarks import front_end_apis

#: Of a chat's token, which a token of another API may cost.
MOST = 1.3


def test_a_token_of_another_api_costs_about_as_much_as_a_chat_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["front_end_apis.py", "--tokens", "1000", "--rounds", "7"])
    assert front_end_apis.main() == 0
    rows = [(row[:24].strip(), row[24:36].strip(), float(row[-9:])) for row in capsys.readouterr().out.splitlines()[1:]]
    assert {api for _, api, _ in rows} == set(front_end_apis.APIS)
    # Log-probabilities are sent once more with a message than with a chat.
    ratios = {(case, api): ratio for case, api, ratio in rows if case != "log-probabilities"}
    assert len(ratios) == 2 * len(front_end_apis.APIS)
    assert max(ratios.values()) <= MOST, ratios
