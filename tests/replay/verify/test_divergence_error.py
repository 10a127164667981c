"""The error of tools that need a run to be what its replay makes of it."""

from __future__ import annotations

from eventlm.bus.log_reader import LogReader
from eventlm.replay.verify.divergence import Code
from eventlm.replay.verify.divergence_error import DivergenceError
from eventlm.replay.verify.verifier import Found
from tests.replay.golden import FOLDER


def test_it_says_where_and_what_it_means() -> None:
    path = FOLDER / "edf_tight.jsonl"
    with LogReader(path) as reader:
        line = next(iter(reader))
    error = DivergenceError.at("t", line, Found(Code.STATE_DIGEST, "digests differ"), ["edf has changed"], "no good")
    assert str(error) == (
        "t diverges from its replay: at event 0 digests differ (edf has changed); no good, "
        "`eventlm replay t` shows details"
    )
    assert error.exit_code == Code.STATE_DIGEST.value.exit_code
