"""`eventlm monitoring`: what it writes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import RunHere


def test_it_writes_three_files_and_names_them(run_here: RunHere) -> None:
    code, output, errors = run_here("monitoring", "-o", "out", "--ttft-seconds", "2.5", "--objective", "99.9")
    assert (code, errors) == (0, "")
    assert output.split() == ["out/prometheus.yml", "out/alerts.yml", "out/dashboard.json"]
    rules = Path("out/alerts.yml").read_text()
    assert "> 2.5\n" in rules
    assert "and 0.1% may" in rules


@pytest.mark.parametrize(
    "flags",
    [
        ("--job", 'a"b'),
        ("--objective", "100"),
        ("--queue-seconds", "0"),
        ("--ttft-seconds", "nan"),
        ("--queue-seconds", "inf"),
    ],
)
def test_what_it_refuses(run_here: RunHere, flags: tuple[str, str]) -> None:
    code, _, errors = run_here("monitoring", "-o", "out", *flags)
    assert code == 2
    assert flags[0] in errors
    assert errors.count("\n") == 1
    assert not Path("out").exists()
