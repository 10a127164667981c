"""Command-line flags made from the table of options, and the `Config` that they make."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from eventlm.cli.parser import Parser
from eventlm.config import Config
from eventlm.config.load import load_config, to_toml
from eventlm.config.model_rules import ModelRules
from eventlm.config.options import CLASSES, MODELS, REPLICASETS, Option, options, sections
from eventlm.config.plugin_spec import format_plugin_spec, format_value
from eventlm.config.structs import ServiceClass
from eventlm.errors import UsageError

#: Before an option's name in the parsed arguments, so that it does not clash with the command's own arguments.
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
    group.add_argument("--config", metavar="FILE", help="TOML file with the options below; flags override it")
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
        _add_replicaset_flag(parser)
        _add_rules_flag(parser)


def _add_class_flag(parser: argparse.ArgumentParser) -> None:
    keys = ", ".join(ServiceClass.__struct_fields__)
    group = parser.add_argument_group("Service classes ([classes.NAME] in the TOML file)")
    group.add_argument(
        "--service-class",
        dest=_PREFIX + CLASSES,
        action="append",
        metavar="NAME:KEY=VALUE,...",
        default=argparse.SUPPRESS,
        help=f"defaults for the requests of a class: {keys}; may be repeated. A key of --api-keys-file names its "
        "class, else the request does, by the header x-eventlm-class or by service_tier; `default` is for requests "
        "that name none",
    )


def _add_replicaset_flag(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Replicasets ([replicasets.NAME] in the TOML file)")
    add_specs_flag(
        group,
        "a further model in the same engine, with any option of the groups model, KV cache, scheduling, worker, "
        "GPU and parallel, such as small:model=smollm2,replicas=2; the rest is as without it; may be repeated. "
        "Requests go by the name of the model",
    )


def _add_rules_flag(parser: argparse.ArgumentParser) -> None:
    keys = ", ".join(ModelRules.__struct_fields__)
    group = parser.add_argument_group("Rules of models ([models.NAME] in the TOML file)")
    group.add_argument(
        "--model-rules",
        dest=_PREFIX + MODELS,
        action="append",
        metavar="NAME:KEY=VALUE,...",
        default=argparse.SUPPRESS,
        help=f"which other model of this server answers requests for one: {keys}; may be repeated",
    )


def add_specs_flag(group: argparse._ActionsContainer, text: str) -> None:
    """Add `--replicaset`, whose specs `given_options` has; `text` is its help."""
    group.add_argument(
        "--replicaset",
        dest=_PREFIX + REPLICASETS,
        action="append",
        metavar="NAME:KEY=VALUE,...",
        default=argparse.SUPPRESS,
        help=text,
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


def with_config(run: Callable[[Config, argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The `run` of a command with these flags: prints the configuration under `--print-config`, else calls `run`."""

    def run_with_config(arguments: argparse.Namespace) -> int:
        config = config_from_arguments(arguments)
        if not arguments.print_config:
            return run(config, arguments)
        from eventlm.bootstrap.option_checks import check_options

        check_options(config)
        print(to_toml(config), end="")
        return 0

    return run_with_config


def _help(option: Option) -> str:
    default = format_plugin_spec(option.default) if option.plugin_kind else option.default
    shown = f" (default: {format_value(default)})" if default not in ("", [], {}) else ""
    return (option.description + shown).replace("%", "%%")
