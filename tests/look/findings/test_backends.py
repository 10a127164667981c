"""Findings about other servers: none where nothing fails, and nothing about steps or blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.events.forwarding import DRAINED
from eventlm.look.findings.backends import find_down_backends
from eventlm.look.findings.find import find_all
from eventlm.look.findings.finding import RunColumns
from eventlm.replay.index.open import open_index
from tests.replay.backend_runs import backends_of, record_backends
from tests.simulation import Chaos
from tests.virtual_backend import BackendTraits

OF_WORKERS = {"preemption_thrash", "predictor_off", "worker_lost", "head_of_line", "stall_with_free_blocks"}


def found(folder: Path, fails: float, kills: int) -> list[str]:
    machine = backends_of(9)._replace(backends=BackendTraits(fails=fails, stalls=0))
    path = record_backends(folder, 9, machine=machine, chaos=Chaos(kills=kills, cancels=0), num_requests=60)
    index = open_index(path)
    findings = {each.kind: each for each in find_all(index)}
    failing = findings.get("backend_failing")
    if failing is not None:
        ends = [index.name(end) for end in index.attempts["end"].tolist()]
        num_failed = sum(end not in ("answered", "withdrawn", "cut") for end in ends)
        assert failing.figures["num_failed"] == num_failed
        assert failing.figures["num_attempts"] == len(ends)
        assert failing.culprit.startswith("backend-")
    return sorted(findings)


def test_failing_attempts_and_backends_that_go_down_are_found(tmp_path: Path) -> None:
    kinds = found(tmp_path, 0.4, 40)
    assert {"backend_failing", "backend_down"} <= set(kinds)
    assert not OF_WORKERS & set(kinds)


def test_backends_that_answer_are_no_finding(tmp_path: Path) -> None:
    assert not {"backend_failing", "backend_down"} & set(found(tmp_path, 0, 0))


def test_a_backend_that_an_operator_drained_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record_backends(tmp_path, 9, chaos=Chaos(kills=40, cancels=0), num_requests=60)
    run = RunColumns(open_index(path))
    assert list(find_down_backends(run))
    monkeypatch.setattr(run.index, "name", lambda _: DRAINED)
    assert not list(find_down_backends(run))
