"""Cost models by name, from files and from runs; what is wrong with a file is said by file and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.core.predictor import StepShape
from eventlm.errors import UsageError
from eventlm.replay.cost.backend_model import BackendCost, BackendsCost, FailureRate
from eventlm.replay.cost.files import built_in_cost_models, fit_trace, load_cost_model
from eventlm.replay.cost.model import LinearCost, Overheads
from eventlm.replay.cost.roofline import RooflineCost
from tests.replay.backend_world import World, shared_prefixes
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


def test_a_run_of_backends_gives_a_model_of_each(tmp_path: Path) -> None:
    path = World(tmp_path, shared_prefixes(1, num_requests=200, per_second=20), num_backends=2).run()
    cost = load_cost_model(str(path))
    assert isinstance(cost, BackendsCost)
    assert [each.name for each in cost.backends] == ["simulated-0", "simulated-1"]
    assert all(each.token_ps > 5_000_000_000 for each in cost.backends)


def test_a_file_of_backends(tmp_path: Path) -> None:
    path = tmp_path / "servers.toml"
    path.write_text('type = "backends"\n[[backends]]\nname = "a"\ntoken_ps = 7\n[[backends]]\nslots = 2\n')
    assert load_cost_model(str(path)) == BackendsCost(
        backends=[BackendCost(name="a", token_ps=7), BackendCost(slots=2)]
    )
    path.write_text('type = "backends"\nbackends = []\n')
    with pytest.raises(UsageError, match="backends: expected `array` of length >= 1"):
        load_cost_model(str(path))


def test_backends_in_numbers() -> None:
    found = load_cost_model("backends:first_ms=5,prefill_tokens_per_s=8000,token_ms=12,more_token_ms=0.2,slots=32")
    expected = BackendCost(
        first_ns=5_000_000, prefill_ps=125_000_000, token_ps=12_000_000_000, token_running_ps=200_000_000, slots=32
    )
    assert found == BackendsCost(backends=[expected])
    failing = load_cost_model("backends:token_ms=1,failed_percent=2.5")
    assert isinstance(failing, BackendsCost)
    assert failing.backends[0].failures == [FailureRate(kind="server", rate_ppm=25_000, status=500)]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ("", "unknown key ''; known: first_ms"),
        ("slot=2", "unknown key 'slot'; did you mean slots"),
        ("token_ms=-1", "token_ms must be a number from 0 to 1e9"),
        ("token_ms=nan", "token_ms must be a number"),
        ("slots", "slots must be a number"),
    ],
)
def test_numbers_that_make_no_sense(numbers: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_cost_model(f"backends:{numbers}")
