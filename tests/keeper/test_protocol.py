"""What the keeper and an engine's process tell each other."""

from __future__ import annotations

from eventlm.cli.parser import Parser
from eventlm.cli.serve.command import configure
from eventlm.config import Config
from eventlm.config.load import load_config
from eventlm.keeper.protocol import (
    VERSION,
    ConfigSource,
    EnginePrepared,
    Prepare,
    decode_config,
    decode_from_engine,
    decode_to_engine,
    encode,
    kept_options,
)


def test_a_configuration_and_its_source_arrive_as_they_are() -> None:
    options = {"model": "fake", "service_class": ["gold:priority=-10"], "ui": False, "api_key": "k"}
    config = load_config(None, {"model": "fake", "api_key": "k", "classes": ["gold:priority=-10"]})
    sent = Prepare(version=VERSION, config=encode(config), source=ConfigSource("eventlm.toml", options))
    received = decode_to_engine(encode(sent))
    assert received == sent
    assert decode_config(received.config) == config


def test_the_kept_options_are_flags() -> None:
    parser = Parser()
    configure(parser)
    kept = kept_options(Config())
    assert kept.keys() <= parser._option_string_actions.keys()
    prepared = EnginePrepared(b"", kept)
    assert decode_from_engine(encode(prepared)) == prepared
