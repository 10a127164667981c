"""One replicaset's part of a run, against the rows of the whole that belong to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eventlm.replay.index.open import open_index
from eventlm.replay.index.replicaset import of_replicaset
from eventlm.replay.index.tables import MarkKind
from tests.replay.golden import FOLDER
from tests.replay.replicaset_runs import made_sets, record_sets
from tests.replay.traces import tampered


def test_one_that_is_alone_has_all() -> None:
    index = open_index(FOLDER / "lrs_dying_workers.jsonl")
    assert of_replicaset(index, 0) is index


@pytest.mark.parametrize("seed", range(3))
def test_the_parts_add_up_to_the_whole(seed: int, tmp_path: Path) -> None:
    whole = open_index(record_sets(tmp_path, seed))
    sets = whole.header.sets_of_replicas()
    parts = [of_replicaset(whole, number) for number in range(len(whole.header.sets))]
    for name in ("requests", "phases", "stretches", "steps", "stages", "loads", "gauges"):
        assert sum(len(part.tables[name]) for part in parts) == len(whole.tables[name]), name
    for name in ("waiting", "live"):
        assert np.sum([part.drains[name] for part in parts], axis=0).tolist() == whole.drains[name].tolist()
    for number, part in enumerate(parts):
        assert len(part.requests)
        for name in ("steps", "gauges"):
            assert {sets[replica] for replica in part.tables[name]["replica"].tolist()} == {number}
        # Rows lead to the same requests as in the whole.
        whole_row = part.phases.row(len(part.phases) - 1)
        request = part.requests.row(whole_row["row"])
        row = whole.find_row(request["request"], request["index"])
        assert whole_row | {"row": row} in list(whole.phases.rows())
        of_requests = part.marks["request"][part.marks["request"] >= 0]
        assert np.isin(of_requests, part.requests["request"]).all()


def test_a_plugin_fails_in_its_own(tmp_path: Path) -> None:
    def fail(objects: list[dict[str, object]]) -> None:
        place = next(number for number, item in enumerate(objects) if item["t"] == "launch")
        at = {name: objects[place][name] for name in ("ts", "c")}
        objects.insert(place, {"t": "plugin_failed", "s": 0, **at, "error": "policy mine:Policy", "replicaset": 1})

    path = tampered(made_sets(tmp_path, num_requests=10) / "trace.jsonl", tmp_path / "failing.jsonl", fail)
    whole = open_index(path, verify=False)
    for number in range(len(whole.header.sets)):
        kinds = of_replicaset(whole, number).marks["kind"].tolist()
        assert (MarkKind.PLUGIN_FAILED in kinds) == (number == 1)
