from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from eventlm.cli.conditions import parse_budget, read_subject
from eventlm.cli.parser import Parser
from eventlm.cli.shrink.command import configure
from eventlm.errors import UsageError
from eventlm.replay.predicate.oracle import Budget
from tests.replay.golden import FOLDER

GOLDEN = str(FOLDER / "edf_tight.jsonl")


def _arguments(*words: str) -> argparse.Namespace:
    parser = Parser(prog="eventlm shrink")
    configure(parser)
    return parser.parse_args([*words, "--keep", "broken", "-o", "small.jsonl"])


def test_a_budget_is_a_number_or_a_time() -> None:
    assert parse_budget(None) == Budget()
    assert parse_budget("200") == Budget(num_trials=200)
    assert parse_budget("1.5min") == Budget(seconds=90)
    for text in ("0", "soon", "-3"):
        with pytest.raises(UsageError, match=f"--budget {text}"):
            parse_budget(text)


def test_a_trace_brings_its_engine_and_flags_go_before_it() -> None:
    subject = read_subject(GOLDEN, _arguments(GOLDEN, "--policy", "lrs", "--num-blocks", "20"))
    assert subject.options["policy"] == {"type": "lrs"}
    assert subject.options["num_blocks"] == 20
    assert subject.options["max_num_batched_tokens"] == 16
    assert subject.workload.incidents
    [note] = subject.notes
    assert "drawn from the others" in note


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = str(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match=r"none\.jsonl"):
        read_subject(path, _arguments(path))
