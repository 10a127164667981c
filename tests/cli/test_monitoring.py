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
        ("--objective", "94.9"),
        ("--objective", "99.99999999999999"),
        ("--objective", "nan"),
        ("--target", ""),
        ("--target", "http://10.0.0.7:8000"),
        ("--target", "10.0.0.7:8000/metrics"),
        ("--target", "10.0.0.7"),
        ("--target", "10.0.0.7:0"),
        ("--target", "10.0.0.7:65536"),
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


@pytest.mark.parametrize(
    "flags",
    [("--target", "[::1]:8000"), ("--target", "llm-1.example:65535"), ("--objective", "95"), ("--objective", "99.999")],
)
def test_what_it_takes(run_here: RunHere, flags: tuple[str, str]) -> None:
    code, _, errors = run_here("monitoring", "-o", "out", *flags)
    assert (code, errors) == (0, "")
    assert flags[0] != "--target" or f'"{flags[1]}"' in Path("out/prometheus.yml").read_text()
