from __future__ import annotations

import subprocess
import sys

import msgspec

from eventlm.replay.predicate.oracle import WORKER
from eventlm.replay.predicate.trial import TrialResult, run_trial
from tests.replay.predicate.test_trial import _trial


def test_a_process_answers_as_this_one_does() -> None:
    trials = [_trial(), _trial("requests < 5"), _trial(num_blocks=1)]
    lines = b"".join(msgspec.json.encode(trial) + b"\n" for trial in trials)
    ran = subprocess.run([sys.executable, "-m", WORKER], input=lines, capture_output=True, check=True, timeout=60)
    results = [msgspec.json.decode(line, type=TrialResult) for line in ran.stdout.splitlines()]
    assert results == [run_trial(trial) for trial in trials]
