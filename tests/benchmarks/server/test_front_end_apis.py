"""What a streamed token costs in each API."""

from __future__ import annotations

import sys

import pytest

from benchmarks.server import front_end_apis


def test_every_case_of_every_api_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["front_end_apis.py", "--tokens", "50", "--rounds", "1"])
    assert front_end_apis.main() == 0
    rows = [(row[:24].strip(), row[24:36].strip(), float(row[-9:])) for row in capsys.readouterr().out.splitlines()[1:]]
    assert {api for _, api, _ in rows} == set(front_end_apis.APIS)
    assert len(rows) == 3 * len(front_end_apis.APIS)
    assert all(ratio > 0 for _, _, ratio in rows)
