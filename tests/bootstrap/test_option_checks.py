"""Options that can be refused without a model, also where a configuration is only printed."""

from __future__ import annotations

import pytest

from eventlm.bootstrap.option_checks import check_options
from eventlm.cli.main import main
from eventlm.config.load import load_config
from eventlm.errors import UsageError

URL = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"launcher": "ray:placement=foo"}, "launcher ray: placement=foo: must be one of pack, strict_pack"),
        ({"micro_batches": 2}, "--micro-batches 2: they are of a pipeline"),
        ({"policy": "edff"}, "unknown policy 'edff'; did you mean edf?"),
        ({"predictor": [1]}, "--predictor: a predictor has 5"),
        ({"fake": "bas_ns=1"}, "--fake: unknown key 'bas_ns'"),
        ({"tensor_parallel_size": 64, "kv_parallel_size": 64}, "are 4,096 ranks, and a replica has up to 1,024"),
        ({"replicasets": ["a:model=x", "b:model=x"]}, "the replicasets a and b both serve 'x'"),
        ({"replicasets": ["a:model=x,served_model_name=y", "b:model=y"]}, "the replicasets a and b both serve 'y'"),
        (
            {"backend": [URL], "model": "x"},
            "--model is for own workers, and --backend is given; leave it out; a backend",
        ),
        ({"backend": [URL], "device": "cpu"}, "--device is for own workers, and --backend is given; leave it out"),
        ({"backend": [URL], "kv_memory": "1GiB"}, "--kv-memory is for own workers"),
        ({"backend": [URL], "tensor_parallel_size": 2}, "--tensor-parallel-size is for own workers"),
        ({"backend": [URL], "replicas": 2}, "--replicas is for own workers"),
        ({"backend": [f"{URL},key=s3,kind=x"]}, f"--backend {URL},key=***,kind=x: kind=x: must be one of vllm"),
        ({"backend": [URL, f"{URL}/v1"]}, f"--backend {URL} is given twice"),
        ({"backend": [URL, URL + "1"], "max_backends": 1}, "--max-backends 1 is less than the 2 that are given"),
        ({"recover": "memory", "record": ""}, "--recover needs a trace, and --no-record is given"),
        ({"recover": "memory", "record_lag": "gap"}, "--recover needs a trace without gaps, and --record-lag gap"),
        ({"hedge_ms": 5}, "--hedge-ms is for backends, and there is none; give --backend too"),
        ({"model": "m", "replicasets": [f"b:backend={URL},device=cpu"]}, "replicaset b: --device is for own workers"),
        ({"replicasets": ["a:model=x", "b:model=y,policy=edff"]}, "replicaset b: unknown policy 'edff'"),
    ],
)
def test_what_is_wrong_with_any_model(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_options(load_config(None, options, environment={}))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_models_are_not_looked_for() -> None:
    check_options(load_config(None, {"replicasets": ["a:model=/nowhere/a", "b:model=b"]}, environment={}))


def test_backends_are_not_asked() -> None:
    sets = ["a:model=a", f"b:backend={URL},model=x"]
    # What is for own workers at the top is not for a set of backends.
    check_options(load_config(None, {"device": "cpu", "hedge_ms": 5, "replicasets": sets}, environment={}))
    check_options(load_config(None, {"backend": [URL], "replicasets": ["a:model=a"]}, environment={}))


def test_a_configuration_that_could_not_start_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "fake", "--replicaset", "b:model=fake", "--print-config"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "both serve 'fake'" in printed.err
