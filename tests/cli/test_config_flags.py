"""Flags made from the configuration's structs."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.cli.config_flags import add_config_flags, add_flag, config_from_arguments
from eventlm.cli.main import main
from eventlm.cli.parser import Parser
from eventlm.config import Config
from eventlm.config.load import load_config
from eventlm.config.options import Option, options
from eventlm.errors import UsageError


@pytest.fixture
def parser() -> Parser:
    made = Parser(prog="x")
    add_config_flags(made)
    return made


def parse(parser: Parser, *arguments: str) -> Config:
    return config_from_arguments(parser.parse_args(arguments))


@pytest.mark.parametrize(
    "flag",
    [
        "--model",
        "--served-model-name",
        "--dtype",
        "--max-model-len",
        "--block-size",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--host",
        "--port",
        "--api-key",
    ],
)
def test_flags_that_mean_the_same_as_vllms_have_its_names(parser: Parser, flag: str) -> None:
    assert flag in parser.format_help()


def test_every_option_has_a_flag_with_its_description_and_default(parser: Parser) -> None:
    text = " ".join(parser.format_help().split())
    for option in options().values():
        assert option.flag in text
        assert option.description.split(";")[0] in text.replace("- ", "-")
    assert "(default: fcfs)" in text
    assert "(default: 127.0.0.1)" in text


def test_without_flags_all_is_default(parser: Parser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVENTLM_API_KEY", raising=False)
    assert parse(parser) == Config()


def test_a_flag_beats_the_file(parser: Parser, tmp_path: Path) -> None:
    path = tmp_path / "eventlm.toml"
    path.write_text("[server]\nport = 1\n[scheduler]\nreplicas = 3\n")
    config = parse(parser, "--config", str(path), "--port", "2", "--policy", "edf:multiplier=2")
    assert (config.server.port, config.scheduler.replicas) == (2, 3)
    assert config.scheduler.policy == {"type": "edf", "multiplier": 2}


def test_sections_can_be_left_out() -> None:
    parser = Parser(prog="x")
    add_config_flags(parser, without=("server",))
    assert "--replicas" in parser.format_help()
    with pytest.raises(UsageError, match="unknown flag --host"):
        parser.parse_args(["--host", "x"])


def test_a_boolean_option_has_two_flags() -> None:
    option = Option("server", "log_it", bool, bool, True, "100 % on", "VALUE", "true or false", ())
    parser = Parser(prog="x")
    add_flag(parser, option)
    assert vars(parser.parse_args([])) == {}
    assert vars(parser.parse_args(["--log-it"])) == {"config.log_it": True}
    assert vars(parser.parse_args(["--no-log-it"])) == {"config.log_it": False}
    assert "--log-it, --no-log-it" in parser.format_help()
    assert "100 % on (default: true)" in " ".join(parser.format_help().split())


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_the_printed_configuration_is_that_of_file_and_flags(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENTLM_API_KEY", "hunter2")
    path = tmp_path / "eventlm.toml"
    path.write_text("[scheduler]\nreplicas = 3\n")
    flags = ["--config", str(path), "--policy", "edf:multiplier=2", "--record", 'a "b"']
    assert main([command, *flags, "--print-config"]) == 0
    printed = tmp_path / "printed.toml"
    printed.write_text(capsys.readouterr().out)
    assert "hunter2" not in printed.read_text()
    expected = load_config(path, {"policy": "edf:multiplier=2", "record": 'a "b"'})
    assert load_config(printed) == expected
