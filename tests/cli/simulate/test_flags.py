"""What `--cost-model` may name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from eventlm.cli.simulate.flags import COST_MODEL_HELP, read_cost_model
from eventlm.errors import UsageError
from eventlm.replay.cost.files import built_in_cost_models, load_cost_model

TRACE = Path(__file__).parents[2] / "replay" / "golden" / "fcfs_one_replica.jsonl"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of recorded runs with one in it."""
    monkeypatch.setenv("EVENTLM_STATE", str(tmp_path))
    folder = tmp_path / "runs"
    (folder / "run-1").mkdir(parents=True)
    shutil.copy(TRACE, folder / "run-1" / "trace.jsonl")
    (folder / "latest").symlink_to("run-1")
    return folder


def test_a_name_and_a_run(runs: Path) -> None:
    assert read_cost_model("h200-llama3-8b") == load_cost_model("h200-llama3-8b")
    fitted = load_cost_model(str(TRACE))
    assert read_cost_model(str(runs / "run-1")) == fitted
    assert read_cost_model("latest") == fitted


def test_a_folder_of_runs_is_not_one(runs: Path) -> None:
    with pytest.raises(UsageError, match="the newest run in it is"):
        read_cost_model(str(runs))


def test_what_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no cost model .*built in: .*h200-llama3-8b"):
        read_cost_model(str(tmp_path / "nothing"))


def test_the_help_lists_the_built_in_models() -> None:
    assert re.findall(r"\b[ah]\d+[\w-]*", COST_MODEL_HELP) == built_in_cost_models()
