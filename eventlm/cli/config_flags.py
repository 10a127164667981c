"""Command-line flags made from the configuration's own table of options, and the way back to a `Config`."""

from __future__ import annotations

import argparse
from typing import Any

from eventlm.cli.parser import Parser
from eventlm.config import Config
from eventlm.config.classes import ServiceClass
from eventlm.config.load import load_config
from eventlm.config.options import CLASSES, Option, options, sections
from eventlm.config.plugin_spec import format_plugin_spec, format_value
from eventlm.config.toml_text import to_toml
from eventlm.errors import UsageError

#: Before an option's name in the parsed arguments, so that it meets no argument of the command's own.
_PREFIX = "config."
#: The name of the model that was given without --model.
_MODEL = "model_argument"


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add the model as an argument without a flag, which `given_options` takes for --model."""
    parser.add_argument(_MODEL, nargs="?", metavar="MODEL", help="the same as --model MODEL")


def add_config_flags(parser: Parser, *, without: tuple[str, ...] = ()) -> None:
    """Add `--config`, `--print-config` and a flag for each option but those of the sections `without`."""
    parser.has_options = True
    group = parser.add_argument_group("configuration")
    group.add_argument("--config", metavar="FILE", help="TOML file with the options below; flags beat it")
    group.add_argument("--print-config", action="store_true", help="print the resulting configuration as TOML and exit")
    for section, title in sections().items():
        if section in without:
            continue
        group = parser.add_argument_group(f"{title} ([{section}] in the TOML file)")
        for option in options().values():
            if option.section == section:
                add_flag(group, option)
    if "server" not in without:
        _add_class_flag(parser)


def _add_class_flag(parser: argparse.ArgumentParser) -> None:
    keys = ", ".join(ServiceClass.__struct_fields__)
    group = parser.add_argument_group("Service classes ([classes.NAME] in the TOML file)")
    group.add_argument(
        "--service-class",
        dest=_PREFIX + CLASSES,
        action="append",
        metavar="NAME:KEY=VALUE,...",
        default=argparse.SUPPRESS,
        help=f"what requests of a class get where they say nothing themselves: {keys}; may be repeated. A key of "
        "--api-keys-file names its class, else a request does, by the header x-eventlm-class or by service_tier; "
        "`default` is for those that name none",
    )


def add_flag(group: argparse._ActionsContainer, option: Option) -> None:
    """Add an option's flag, `--x` and `--no-x` for a boolean; if not given, it is absent from the result."""
    keywords: dict[str, Any] = {"metavar": option.metavar}
    if option.bare_type == list[str]:
        keywords["action"] = "append"
    if option.bare_type is bool:
        keywords = {"action": argparse.BooleanOptionalAction}
    group.add_argument(
        option.flag, dest=_PREFIX + option.name, default=argparse.SUPPRESS, help=_help(option), **keywords
    )
    if option.off:
        group.add_argument(
            option.flag.replace("--", "--no-", 1),
            dest=_PREFIX + option.name,
            action="store_const",
            const="",
            default=argparse.SUPPRESS,
            help=option.off,
        )


def config_from_arguments(arguments: argparse.Namespace) -> Config:
    """The configuration under `--config` and the flags given. Raises UsageError."""
    return load_config(arguments.config, given_options(arguments))


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Values of the configuration's flags that were given, by the options' names. Raises UsageError for two models."""
    given = {name.removeprefix(_PREFIX): value for name, value in vars(arguments).items() if name.startswith(_PREFIX)}
    model = getattr(arguments, _MODEL, None)
    if model is not None and given.setdefault("model", model) != model:
        raise UsageError(f"{model} and --model {given['model']} are two models; name one")
    return given


def print_config(config: Config) -> int:
    """What `--print-config` does; returns the exit code."""
    print(to_toml(config), end="")
    return 0


def _help(option: Option) -> str:
    default = format_plugin_spec(option.default) if option.plugin_kind else option.default
    shown = f" (default: {format_value(default)})" if default not in ("", [], {}) else ""
    return (option.description + shown).replace("%", "%%")
