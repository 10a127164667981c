"""Predicted times that are off; stalls and thrash are planted runs in `test_find`."""

from __future__ import annotations

from pathlib import Path

from eventlm.look.findings.find import find_all
from eventlm.replay.index.open import open_index
from eventlm.replay.simulate.simulation import simulate
from tests.look.planted import make_load
from tests.replay.made_workloads import COST, PREDICTOR, make_engine


def test_a_predictor_that_is_off_by_a_factor(tmp_path: Path) -> None:
    engine = make_engine(num_blocks=1024, max_model_len=1024)
    for factor, direction in ((3, "too long"), (0.3, "too short")):
        predictor = [int(each * factor) for each in PREDICTOR]
        folder = tmp_path / direction
        run = simulate(make_load(2, rate=8, num_requests=60), engine, COST, predictor=predictor, record=folder)
        (finding,) = find_all(open_index(run.run_folder))
        assert finding.kind == "predictor_off"
        assert direction in finding.title
