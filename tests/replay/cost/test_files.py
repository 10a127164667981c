"""Cost models by name, from files and from runs; what is wrong with a file is said by file and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.core.predictor import StepShape
from eventlm.errors import UsageError
from eventlm.replay.cost.files import built_in_cost_models, fit_trace, load_cost_model
from eventlm.replay.cost.model import LinearCost, Overheads
from eventlm.replay.cost.roofline import RooflineCost
from tests.replay.replicaset_runs import made_sets

GOLDEN = Path(__file__).parents[1] / "golden"
LINEAR = LinearCost(
    base_ps=5_000_000,
    prefill_ps=40_000,
    ratios_ppm=[900_000, 1_100_000],
    seed=3,
    overheads=Overheads(report_ns=7),
)
LINEAR_TEXT = """\
type = "linear"
base_ps = 5_000_000
prefill_ps = 40_000
ratios_ppm = [900_000, 1_100_000]
seed = 3

[overheads]
report_ns = 7
"""


def test_the_built_in_ones_load() -> None:
    assert set(built_in_cost_models()) >= {"a100-llama3-8b", "h200-llama3-8b"}
    for name in built_in_cost_models():
        assert isinstance(load_cost_model(name), RooflineCost)


def test_a_file_gives_the_model_that_it_describes(tmp_path: Path) -> None:
    path = tmp_path / "cost.toml"
    path.write_text(LINEAR_TEXT)
    assert load_cost_model(str(path)) == LINEAR


def test_an_unknown_name_lists_what_there_is() -> None:
    words = r"no cost model 'h200-lama'; did you mean h200-llama3-8b\? Built in: .*a100-llama3-8b"
    with pytest.raises(UsageError, match=words):
        load_cost_model("h200-lama")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('type = "linear"\nbase_ps = "3"', r"cost.toml, base_ps: expected `int`, got `str`"),
        ('type = "linear"\nbase_ps = -3', r"cost.toml, base_ps: expected `int` >= 0"),
        ('type = "linear"\nbase_ps = 1\nprefil_ps = 2', r"cost.toml: .*unknown field `prefil_ps`"),
        ('type = "linear"', r"cost.toml: .*missing required field `base_ps`"),
        ('type = "linear"\nbase_ps = 1\n[overheads]\nreport = 3', r"cost.toml, overheads: .*unknown field `report`"),
        ('type = "quadratic"', r"cost.toml, type: invalid value 'quadratic'"),
        ("base_ps = 1", r"cost.toml: .*missing required field `type`"),
        ("base_ps = ", r"cost.toml, line 1, column"),
        ('type = "roofline"', r"cost.toml: .*missing required field `machine`"),
        (
            'type = "roofline"\n[machine]\nname = "x"\nflops_per_s = 5\nmemory_bytes_per_s = 5\nnum_gpus = 2',
            r"cost.toml, machine: all_reduce_bytes_per_s is missing",
        ),
    ],
)
def test_an_error_in_a_file_names_the_key(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cost.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_cost_model(str(path))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"cannot read the cost model nowhere/cost.toml: No such file"):
        load_cost_model("nowhere/cost.toml")


def test_a_run_gives_one_without_its_time() -> None:
    path = sorted(GOLDEN.glob("*.jsonl"))[0]
    fitted = fit_trace(path)
    assert fitted.report.num_steps > 0
    assert load_cost_model(str(path)) == fitted.model
    assert fitted.model.ratios_ppm
    assert not fitted.model.slowness_ppm
    assert fitted.model.step_ns(StepShape(0, 1, 10, 0, 0), 0, 0) >= 1


def test_a_run_of_several_replicasets_gives_each_its_own(tmp_path: Path) -> None:
    path = made_sets(tmp_path, num_requests=30)
    shape = StepShape(0, 4, 400, 0, 0)
    first, second = (load_cost_model(str(path), name) for name in ("main", "small"))
    assert second.step_ns(shape, 0, 0) > 1.5 * first.step_ns(shape, 0, 0)
    with pytest.raises(
        UsageError, match="of its name, and the run has main, small; give each simulated replicaset one"
    ):
        load_cost_model(str(path), "other")
