"""Configurations of several replicasets: what each gets from the top, and mistakes in one line."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from eventlm.config import Config, CoreConfig
from eventlm.config.load import config_hash, load_config, redacted, to_toml
from eventlm.config.replicasets import check_sets, configs_of_replicasets, first_replicaset, keys_of_further
from eventlm.errors import UsageError


def load(*specs: str, **options: object) -> Config:
    return load_config(None, {**options, "replicasets": list(specs)}, environment={})


def test_the_top_is_the_first_set_and_the_others_take_from_it_what_they_do_not_say() -> None:
    config = load("small:model=b,replicas=3,policy=edf:multiplier=2", "wide:max_num_seqs=4", model="a", replicas=2)
    sets = configs_of_replicasets(config)
    assert [
        (name, each.model.model, each.scheduler.replicas, each.scheduler.max_num_seqs) for name, each in sets.items()
    ] == [
        ("main", "a", 2, 256),
        ("small", "b", 3, 256),
        ("wide", "a", 2, 4),
    ]
    assert sets["small"].scheduler.policy == {"type": "edf", "multiplier": 2}
    assert first_replicaset(config) == sets["main"]
    assert all(each.replicasets == {} for each in sets.values())


def test_what_describes_the_model_at_the_top_is_not_for_another() -> None:
    config = load(
        "b:model=b", "c:max_num_seqs=4", model="a", revision="r", served_model_name="n", predictor=[1, 0, 0, 0, 0]
    )
    _, other, same = configs_of_replicasets(config).values()
    assert (other.model.revision, other.model.served_model_name, other.scheduler.predictor) == ("", "", [])
    assert (same.model.revision, same.model.served_model_name) == ("r", "n")


def test_without_a_model_at_the_top_the_named_sets_are_all() -> None:
    config = load("a:model=x", "main:model=y", max_num_seqs=4)
    assert [(name, each.model.model) for name, each in configs_of_replicasets(config).items()] == [
        ("a", "x"),
        ("main", "y"),
    ]
    # As ever where there are none.
    assert [each.model.model for each in configs_of_replicasets(load_config(None, environment={})).values()] == [
        "smollm2"
    ]


def test_flags_override_the_file_key_by_key_and_the_printed_configuration_loads_back(tmp_path: Path) -> None:
    path = tmp_path / "eventlm.toml"
    path.write_text(
        '[replicasets.small]\nmodel = "b"\nreplicas = 3\npolicy = "lrs"\n[replicasets.other]\nmodel = "c"\n'
    )
    config = load_config(path, {"replicasets": ["small:replicas=2,predictor=1,2,3,4,5"]}, environment={})
    assert config.replicasets == {
        "small": {"model": "b", "replicas": 2, "policy": {"type": "lrs"}, "predictor": [1, 2, 3, 4, 5]},
        "other": {"model": "c"},
    }
    path.write_text(to_toml(config))
    again = load_config(path, environment={})
    assert again == config
    assert redacted(again)["replicasets"] == config.replicasets
    assert config_hash(redacted(again)) != config_hash(redacted(load("small:model=b")))
    assert "replicasets" not in redacted(Config())


def test_replicasets_that_are_there_without_being_named() -> None:
    defaults = {"model": "m", "replicasets": {"a": {"model": "x", "replicas": 2}, "b": {"model": "y"}}}
    given = {"replicasets": {"b": {"replicas": "3"}, "c": {"model": "z", "policy": {"type": "lrs"}}}}
    config = load_config(None, given, defaults=defaults, environment={})
    assert config.model.model == "m"
    assert config.replicasets == {
        "a": {"model": "x", "replicas": 2},
        "b": {"model": "y", "replicas": 3},
        "c": {"model": "z", "policy": {"type": "lrs"}},
    }


def test_what_further_replicasets_have_otherwise_than_the_first() -> None:
    """As a header has it, whose top is the first one, whether the user named it or not."""
    config = load("a:model=x,dtype=float32,threads=3", "b:model=y,threads=3", "c:model=x,replicas=2")
    first, *others = configs = [*configs_of_replicasets(config).values()]
    keys = keys_of_further(configs)
    assert keys == [{"model": "y", "dtype": "auto"}, {"dtype": "auto", "threads": 0, "replicas": 2}]
    header = msgspec.structs.replace(first, replicasets=dict(zip("bc", keys, strict=True)))
    assert [*configs_of_replicasets(header).values()] == [first, *others]


def test_sets_are_told_apart_by_their_models() -> None:
    core = CoreConfig(models=["m"], num_blocks=8, max_model_len=100)
    check_sets({"a": core, "b": msgspec.structs.replace(core, models=["n"])})
    with pytest.raises(UsageError, match="the replicasets a and b both serve 'm'"):
        check_sets({"a": core, "b": msgspec.structs.replace(core, models=["n", "m"])})
    many = msgspec.structs.replace(core, models=["n"], num_replicas=1024)
    with pytest.raises(UsageError, match="up to 1,024"):
        check_sets({"a": core, "b": many})


def test_the_first_may_have_options_of_its_own() -> None:
    configs = configs_of_replicasets(load("b:model=x", "main:replicas=2", model="m", served_model_name="s"))
    found = [
        (name, own.model.model, own.model.served_model_name, own.scheduler.replicas) for name, own in configs.items()
    ]
    assert found == [("main", "m", "s", 2), ("b", "x", "", 1)]


def test_sets_of_backends_take_nothing_of_own_workers_from_the_top() -> None:
    own = "http://h:1,model=m,weight=2"
    config = load(
        f"b:backend={own},backend=http://h:2,hedge_ms=5,served_model_name=x", "c:max_num_seqs=4",
        model="a", served_model_name="s", device="cpu", replicas=2, max_queue_len=7, silence_timeout_seconds=9,
    )  # fmt: skip
    main, b, c = configs_of_replicasets(config).values()
    assert b.gateway.backend == [own, "http://h:2"]
    assert (b.model.model, b.model.served_model_name, b.gpu.device, b.scheduler.replicas) == ("", "x", "auto", 1)
    # The rest is as at the top.
    assert (b.scheduler.max_queue_len, b.gateway.silence_timeout_seconds, b.gateway.hedge_ms) == (7, 9, 5)
    assert (main.gateway.backend, c.gateway.backend, c.gpu.device, c.scheduler.replicas) == ([], [], "cpu", 2)


def test_backends_at_the_top_are_not_for_a_set_with_a_model() -> None:
    config = load("a:model=x,replicas=2", "b:max_num_seqs=4", backend=["http://h:1"], hedge_ms=5)
    assert config.model.model == ""
    found = [
        (name, own.model.model, own.gateway.backend, own.gateway.hedge_ms)
        for name, own in configs_of_replicasets(config).items()
    ]
    assert found == [("main", "", ["http://h:1"], 5), ("a", "x", [], 0), ("b", "", ["http://h:1"], 5)]


def test_a_set_needs_a_model() -> None:
    with pytest.raises(UsageError, match="the replicaset b has no model: give it one, or --model for those without"):
        load("a:model=x", "b:replicas=2")
    assert load("b:replicas=2", model="m").replicasets == {"b": {"replicas": 2}}


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["a:mdel=x"], "--replicaset a:mdel=x: unknown key 'mdel'; did you mean model?"),
        (["a:tensor_parallel=2"], "unknown key 'tensor_parallel'; did you mean tensor_parallel_size?"),
        (["a:port=3"], "port is the whole engine's; it belongs in the section [server]"),
        (["a:replicas=0"], "--replicaset a:replicas=0: replicas = '0': must be an integer from 1 to 1024"),
        (["a:model=x,model=y"], "it gives model twice"),
        (["a:quick"], "'quick' is not of the form KEY=VALUE"),
        (["a"], "--replicaset a: it says nothing of the replicaset; write NAME:KEY=VALUE, such as a:model=smollm2"),
        (["a:"], "--replicaset a:: it says nothing of the replicaset"),
        (["a:model=x", "a:model=y"], "two replicasets are called a"),
        (["main:model=x"], "two replicasets are called main: the other is that of --model m"),
        (["a b:model=x"], "a replicaset's name has 1 to 64 letters, digits, - or _"),
        (["a:policy="], "policy = '': must be NAME"),
    ],
)
def test_mistakes_in_a_spec(specs: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(*specs, model="m")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (
            "[replicasets.a.parallel]\ntensor_parallel_size = 2",
            ", [replicasets.a]: keys of [parallel] go directly under [replicasets.a], such as tensor_parallel_size",
        ),
        ("[replicasets.a.cache]", "keys of [cache] go directly under [replicasets.a], such as block_size"),
        (
            "[replicasets.a]\nmodel = 'x'\n[replicasets.a]",
            "column 15: [replicasets.a] appears twice; put its keys into one",
        ),
        ("[replicasets.a]\nmodell = 'x'", ", [replicasets.a]: unknown key 'modell'; did you mean model?"),
        ("[replicasets.a]\nreplicas = '2'", ", [replicasets.a]: replicas = '2': must be an integer from 1 to 1024"),
        ("[replicasets]\na = 3", ", [replicasets.a]: must be a table of options such as model and replicas"),
        ("replicasets = 3", ": replicasets = 3: must be tables, one [replicasets.NAME] for each model"),
        ("[replicaset.a]\nmodel = 'x'", ": unknown section [replicaset]; did you mean replicasets?"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, toml: str, message: str) -> None:
    path = tmp_path / "eventlm.toml"
    path.write_text(toml)
    with pytest.raises(UsageError) as caught:
        load_config(path, environment={})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
