"""Configuration from TOML, environment and flags: precedence, errors, and the text that loads back."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventlm.config import CoreConfig, ServiceClass
from eventlm.config.load import config_hash, load_config, redacted, replace_fields, to_toml
from eventlm.config.options import options, sections
from eventlm.config.plugin_spec import parse_parameters
from eventlm.errors import UsageError

NO_ENVIRONMENT: dict[str, str] = {}


def file_error(tmp_path: Path, text: str) -> str:
    path = tmp_path / "eventlm.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_config(path, environment=NO_ENVIRONMENT)
    message = str(caught.value)
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def test_flags_beat_the_environment_which_beats_the_file_which_beats_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "eventlm.toml"
    path.write_text('[server]\nport = 1\napi_key = "file"\n[scheduler]\nreplicas = 3\n')
    environment = {"EVENTLM_API_KEY": "environment"}
    config = load_config(path, {"port": "2"}, environment=environment)
    assert (config.server.port, config.scheduler.replicas, config.server.host) == (2, 3, "127.0.0.1")
    assert config.server.api_key == "environment"
    assert load_config(path, {"api_key": "flag"}, environment=environment).server.api_key == "flag"
    assert load_config(path, environment={"EVENTLM_API_KEY": ""}).server.api_key == "file"


def test_a_flag_does_not_hide_a_mistake_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "eventlm.toml"
    path.write_text("[server]\nport = true\n")
    with pytest.raises(UsageError, match="port = True"):
        load_config(path, {"port": "2"}, environment=NO_ENVIRONMENT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprt = 1", ", [server]: unknown key 'prt'; did you mean port?"),
        (
            "[model]\nmax_num_seq = 1",
            ", [model]: unknown key 'max_num_seq'; did you mean max_num_seqs in the section [scheduler]?",
        ),
        ("[server]\nblock_size = 1", ", [server]: block_size belongs in the section [cache]"),
        ("[cache]\nzzzzzz = 1", ", [cache]: unknown key 'zzzzzz'; known: block_size, num_blocks, kv_memory"),
        (
            "[servr]\nport = 1",
            ": unknown section [servr]; did you mean server? "
            "Known: model, cache, scheduler, server, worker, gpu, parallel, gateway, record, log, telemetry, classes",
        ),
        ("port = 1", ": port belongs in the section [server]"),
        (
            "[cache]\nmem_fraction_static = 0.9",
            ", [cache]: unknown key 'mem_fraction_static'; its name here is gpu_memory_utilization in the section",
        ),
        ("prot = 1", ": unknown key 'prot'; did you mean port in the section [server]?"),
        ("server = 3", ": server = 3: must be a table, [server]"),
        ("[server]\nport = '8'", ", [server]: port = '8': must be an integer from 0 to 65535"),
        ("[server]\nport = 70000", ", [server]: port = 70000: must be an integer from 0 to 65535"),
        ("[server]\nport = 8000.0", ", [server]: port = 8000.0: must be an integer from 0 to 65535"),
        (
            "[scheduler]\nmax_num_seqs = 0",
            ", [scheduler]: max_num_seqs = 0: must be an integer of at least 1, below 2^63",
        ),
        ("[server]\nhost = 2020-01-01", "host = datetime.date(2020, 1, 1): must be a string"),
        (
            "[model]\ndtype = 'bf16'",
            ", [model]: dtype = 'bf16': must be one of auto, bfloat16, float16, float32",
        ),
        (
            "[cache]\nkv_memory = '2G'",
            ", [cache]: kv_memory = '2G': must be auto, or a size such as 512MiB or 2GiB",
        ),
        ("[scheduler]\npredictor = [1, 'x']", "predictor = [1, 'x']: must be a list of integers"),
        ("[scheduler]\npolicy = { multiplier = 2 }", "(`type` is missing)"),
        ("[scheduler]\npolicy = 3", "policy = 3: must be NAME, NAME:PARAMETER=VALUE,... or a table"),
        ("[scheduler]\npolicy = 'edf:x=1,x=2'", "('edf:x=1,x=2' gives x twice)"),
        ("policy = { type = 'edf' }", ": policy belongs in the section [scheduler]"),
        ("x = \n", ", line 1, column 5: invalid value"),
        ('{"port": 8000}', ", line 1, column 1: invalid statement (the configuration must be TOML)"),
        ('[server]\nhost = "', ", line 2, column 9: unterminated string"),
        ("[server]\nport = 1\nport = 2\n", ", line 3, column "),
    ],
)
def test_an_error_in_a_file_says_where_and_what_is_allowed(tmp_path: Path, text: str, message: str) -> None:
    assert message in file_error(tmp_path, text)


def test_a_file_that_is_not_utf8_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "eventlm.toml"
    path.write_bytes(b'[server]\nhost = "\xff"\n')
    with pytest.raises(UsageError, match="line 2, column 9: not UTF-8"):
        load_config(path)


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot read the configuration"):
        load_config(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("port", "x", "--port 'x': must be an integer from 0 to 65535"),
        ("port", "-1", "--port '-1': must be an integer from 0 to 65535"),
        ("port", True, "--port True: must be an integer from 0 to 65535"),
        ("max_model_len", "4k", "--max-model-len '4k': must be an integer of at least 0, below 2^63"),
        ("dtype", "bf16", "--dtype 'bf16': must be one of auto, bfloat16, float16, float32"),
        ("predictor", "1,a", "--predictor '1,a': must be a list of integers"),
        ("fake", "x", "--fake: 'x': 'x' is not of the form PARAMETER=VALUE"),
        ("policy", "", "--policy: '' names no plug-in"),
        ("prt", "1", "unknown option 'prt'; did you mean port?"),
        ("ep_size", 2, "'ep_size'; with tensor_parallel_size each rank has a part of every expert"),
        ("micro_batches", 17, "--micro-batches 17: must be an integer from 0 to 16"),
    ],
)
def test_an_error_in_a_flag_names_it(name: str, value: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_config(None, {name: value}, environment=NO_ENVIRONMENT)
    assert message in str(caught.value)


def test_an_error_in_a_keyword_names_it_as_one() -> None:
    for overrides, message in (
        ({"port": "x"}, "port='x': must be an integer"),
        ({"fake": "x"}, "fake: 'x': 'x' is not"),
    ):
        with pytest.raises(UsageError) as caught:
            load_config(None, overrides, environment=NO_ENVIRONMENT, are_flags=False)
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("alias", "dtype"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_the_short_names_of_types(tmp_path: Path, alias: str, dtype: str) -> None:
    file = tmp_path / "eventlm.toml"
    file.write_text(f'[model]\ndtype = "{alias}"\n')
    assert load_config(file, environment=NO_ENVIRONMENT).model.dtype == dtype
    assert load_config(None, {"dtype": alias}, environment=NO_ENVIRONMENT).model.dtype == dtype


def test_flags_are_converted_by_their_type() -> None:
    config = load_config(
        None,
        {
            "policy": "edf:multiplier=2,min_deadline_ms=300",
            "predictor": "1,2,3,4,5",
            "fake": "step_ms=1.5,seed=7",
            "kv_memory": "1.5GiB",
            "model": "123",
        },
        environment=NO_ENVIRONMENT,
    )
    assert config.scheduler.policy == {"type": "edf", "multiplier": 2, "min_deadline_ms": 300}
    assert config.scheduler.predictor == [1, 2, 3, 4, 5]
    assert config.model.fake == {"step_ms": 1.5, "seed": 7}
    assert (config.cache.kv_memory, config.model.model) == ("1.5GiB", "123")


def test_a_plugin_in_a_file_is_a_table_or_a_spec(tmp_path: Path) -> None:
    path = tmp_path / "eventlm.toml"
    path.write_text('[scheduler]\npolicy = "edf:multiplier=2"\n[scheduler.batcher]\ntype = "dynamic"\ntarget_ms = 50\n')
    scheduler = load_config(path, environment=NO_ENVIRONMENT).scheduler
    assert scheduler.policy == {"type": "edf", "multiplier": 2}
    assert scheduler.batcher == {"type": "dynamic", "target_ms": 50}


def test_no_secret_is_shown_recorded_or_quoted(tmp_path: Path) -> None:
    config = load_config(None, {"api_key": "hunter2"}, environment=NO_ENVIRONMENT)
    assert "hunter2" not in to_toml(config) + repr(redacted(config))
    assert redacted(config)["server"]["api_key"] == "***"
    assert redacted(load_config(None, environment=NO_ENVIRONMENT))["server"]["api_key"] == ""
    assert "8437" not in file_error(tmp_path, "[server]\napi_key = 8437")


def test_no_key_of_a_backend_is_shown_recorded_or_quoted(tmp_path: Path) -> None:
    url = "http://h:1"
    spec = f"{url},key=hunter2,weight=2"
    config = load_config(
        None, {"backend": [spec, url], "replicasets": [f"b:backend={spec},replicas=2"]}, environment=NO_ENVIRONMENT
    )
    assert config.gateway.backend == [spec, url]
    assert config.replicasets == {"b": {"backend": [spec], "replicas": 2}}
    shown = f"{url},key=***,weight=2"
    assert redacted(config)["gateway"]["backend"] == [shown, url]
    assert redacted(config)["replicasets"]["b"]["backend"] == [shown]
    printed = to_toml(config)
    assert f'\n# backend = ["{shown}"]  (set but not shown; give keys by key_env or key_file)' in printed
    assert "hunter2" not in printed + repr(redacted(config))
    # A printed configuration loads back where keys lie elsewhere.
    path = tmp_path / "printed.toml"
    config = load_config(None, {"backend": [f"{url},key_env=K"]}, environment=NO_ENVIRONMENT)
    path.write_text(to_toml(config))
    assert load_config(path, environment=NO_ENVIRONMENT) == config
    for text in (f'backend = "{spec}"', "backend = [8437]", f'backend = {{ key = "{spec}" }}'):
        message = file_error(tmp_path, f"[gateway]\n{text}")
        assert "must be a list of URL" in message
        assert "hunter2" not in message
        assert "8437" not in message
    for own in ("b:key=hunter2", "b:backend=http://h,kay=1,key=hunter2"):
        with pytest.raises(UsageError) as caught:
            load_config(None, {"replicasets": [own]}, environment=NO_ENVIRONMENT)
        assert "hunter2" not in str(caught.value)


def test_the_header_without_backends_is_as_before_there_were_any() -> None:
    assert "gateway" not in redacted(load_config(None, environment=NO_ENVIRONMENT))
    assert "gateway" in redacted(load_config(None, {"hedge_ms": 5}, environment=NO_ENVIRONMENT))


def test_the_hash_depends_on_values_and_not_on_order_or_secrets() -> None:
    def hash_of(**overrides: object) -> str:
        return config_hash(redacted(load_config(None, overrides, environment=NO_ENVIRONMENT)))

    tables = redacted(load_config(None, environment=NO_ENVIRONMENT))
    assert config_hash(tables) == config_hash(dict(reversed(tables.items())))
    assert len(hash_of()) == 16
    assert hash_of() != hash_of(port=1)
    assert hash_of(api_key="a") == hash_of(api_key="b") != hash_of()


def test_service_classes_of_file_and_flags(tmp_path: Path) -> None:
    path = tmp_path / "eventlm.toml"
    path.write_text("[classes.gold]\npriority = -10\ndeadline_ms = 500\n[classes.bronze]\npriority = 10\n")
    specs = ["bronze:slo_ttft_ms=900,drop_if_late=true", "bare"]
    config = load_config(path, {"classes": specs}, environment=NO_ENVIRONMENT)
    assert config.classes == {
        "gold": ServiceClass(priority=-10, deadline_ms=500),
        # A flag stands for the whole class.
        "bronze": ServiceClass(slo_ttft_ms=900, drop_if_late=True),
        "bare": ServiceClass(),
    }
    printed = tmp_path / "printed.toml"
    printed.write_text(to_toml(config))
    assert load_config(printed, environment=NO_ENVIRONMENT) == config
    assert redacted(config)["classes"]["gold"]["priority"] == -10


@pytest.mark.parametrize(
    ("spec", "toml", "message"),
    [
        ("a:priorty=1", "priorty = 1", "unknown key 'priorty'; did you mean priority?"),
        ("a:zzz=1", "zzz = 1", "unknown key 'zzz'; known: priority, deadline_ms, slo_ttft_ms"),
        ("a:priority=x", "priority = 'x'", "priority=x: expected `int`, got `str`"),
        ("a:deadline_ms=-1", "deadline_ms = -1", "deadline_ms=-1: expected `int` >= 0"),
        ("a:drop_if_late=true", "drop_if_late = true", "drop_if_late needs a deadline_ms or a slo_ttft_ms"),
    ],
)
def test_an_error_in_a_service_class_says_which(tmp_path: Path, spec: str, toml: str, message: str) -> None:
    told = file_error(tmp_path, f"[classes.a]\n{toml}")
    assert told.startswith(f", [classes.a]: {message}")
    with pytest.raises(UsageError) as caught:
        load_config(None, {"classes": [spec]}, environment=NO_ENVIRONMENT)
    assert str(caught.value).startswith(f"--service-class {spec}: {message}")


@pytest.mark.parametrize("name", ["auto", "two words", "x" * 65, ""])
def test_a_class_has_a_name_that_can_stand_anywhere(name: str) -> None:
    with pytest.raises(UsageError, match="a class's name has 1 to 64 letters"):
        load_config(None, {"classes": [f"{name}:priority=1"]}, environment=NO_ENVIRONMENT)


def test_classes_are_tables(tmp_path: Path) -> None:
    assert file_error(tmp_path, "classes = 3").startswith(": classes = 3: must be tables, one [classes.NAME]")
    assert file_error(tmp_path, "[classes]\ngold = 3").startswith(", [classes.gold]: must be a table of priority")


def test_every_option_says_what_it_is_and_what_it_takes() -> None:
    assert len(options()) == sum(len(msgspec.structs.fields(type(getattr(default_config(), s)))) for s in sections())
    for option in options().values():
        assert option.description
        assert option.allowed
        assert getattr(getattr(default_config(), option.section), option.name) == option.default


def default_config() -> object:
    return load_config(None, environment=NO_ENVIRONMENT)


printable = st.text(st.characters(codec="utf-8"), max_size=20)
parameters = st.dictionaries(
    printable.filter(lambda key: key != "type"),
    st.one_of(
        st.integers(-(2**53), 2**53),
        st.booleans(),
        printable,
        st.floats(allow_nan=False, allow_infinity=False),
    ),
    max_size=3,
)


@settings(max_examples=50)
@given(
    st.fixed_dictionaries(
        {
            "model": printable,
            "host": printable,
            "port": st.integers(0, 65535),
            "dtype": st.sampled_from(["auto", "float16"]),
            "predictor": st.lists(st.integers(0, 2**60), max_size=5),
            "fake": parameters,
            "policy": parameters.map(lambda table: {"type": "edf"} | table),
        }
    )
)
def test_the_printed_configuration_loads_back_to_the_same(
    tmp_path_factory: pytest.TempPathFactory, overrides: dict[str, object]
) -> None:
    config = load_config(None, overrides, environment=NO_ENVIRONMENT)
    path = tmp_path_factory.getbasetemp() / "printed.toml"
    path.write_bytes(to_toml(config).encode())
    assert load_config(path, environment=NO_ENVIRONMENT) == config


def test_numbers_and_lists_that_json_does_not_have_are_printed_as_toml(tmp_path: Path) -> None:
    policy = {"type": "m:P", "limit": float("inf"), "steps": [{"size": 1e-7}, {"size": 2}]}
    path = tmp_path / "printed.toml"
    config = load_config(None, {"policy": policy}, environment=NO_ENVIRONMENT)
    path.write_text(to_toml(config))
    assert load_config(path, environment=NO_ENVIRONMENT) == config


def test_a_secret_is_all_that_a_printed_configuration_lacks(tmp_path: Path) -> None:
    path = tmp_path / "printed.toml"
    path.write_text(to_toml(load_config(None, {"api_key": "k", "port": 1}, environment=NO_ENVIRONMENT)))
    assert load_config(path, environment=NO_ENVIRONMENT) == load_config(None, {"port": 1}, environment=NO_ENVIRONMENT)


def test_fields_of_the_core_are_replaced_by_name() -> None:
    core = CoreConfig(models=["m"], num_blocks=8, max_model_len=64)
    changed = replace_fields(core, parse_parameters("num_blocks=16,max_num_seqs=4"), where="--set")
    assert (changed.num_blocks, changed.max_num_seqs, changed.max_model_len) == (16, 4, 64)
    with pytest.raises(UsageError, match="--set: unknown key 'num_block'; did you mean num_blocks"):
        replace_fields(core, {"num_block": 1}, where="--set")
    with pytest.raises(UsageError, match="--set: num_blocks=0: expected `int` >= 2"):
        replace_fields(core, {"num_blocks": 0}, where="--set")
