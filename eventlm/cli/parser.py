"""An argparse parser whose errors are UsageErrors and name the nearest flag or choice; exit codes in its help."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn

from eventlm.config.options import did_you_mean, options
from eventlm.config.other_engines import name_elsewhere
from eventlm.errors import ExitCode, UsageError

#: Exit codes of every command that reads a trace.
READING_A_TRACE = (ExitCode.OK, ExitCode.USAGE, ExitCode.DAMAGED, ExitCode.TORN, ExitCode.VERSION)

_FLAG = re.compile(r"--[a-z-]+")
#: What somebody may write after a flag that takes no value.
_SWITCHES = ("true", "false", "yes", "no", "on", "off")
#: The beginning of argparse's error for a missing argument.
_REQUIRED = "the following arguments are required: "


def add_number(
    group: argparse._ActionsContainer,
    flag: str,
    text: str,
    *,
    kind: type[int] | type[float] = int,
    least: float | None = None,
    above: float | None = None,
    **keywords: Any,
) -> None:
    """Add a flag that takes a number, N or X: finite and not below `least`, or larger than `above`."""

    def number(given: str) -> float:
        value = kind(given)
        if least is not None and not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{given} is not a number of at least {least}")
        if above is not None and not value > above:
            raise argparse.ArgumentTypeError(f"{given} is not above {above}")
        return value

    number.__name__ = kind.__name__
    group.add_argument(flag, type=number, help=text, **{"metavar": "N" if kind is int else "X"} | keywords)


class HelpFormatter(argparse.HelpFormatter):
    """Prose is filled to the terminal's width; a paragraph with an indented line (examples, a table) stays as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        return "\n\n".join(
            p if "\n " in p else super(HelpFormatter, self)._fill_text(p, width, indent) for p in paragraphs
        )


class Parser(argparse.ArgumentParser):
    """Flags are never abbreviated, help keeps its examples as they stand, and nothing but `--help` exits.

    `has_options`: the configuration's options are among its flags.
    """

    has_options = False

    def __init__(self, **keywords: Any) -> None:
        keywords.setdefault("formatter_class", HelpFormatter)
        super().__init__(allow_abbrev=False, **keywords)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; raises UsageError for unknown arguments, with the hints of the subcommand."""
        args = sys.argv[1:] if args is None else list(args)
        self._check_switches(args)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].partition("=")[0]
            kind = "flag" if word.startswith("-") else "argument"
            hint = self._hint(word) if kind == "flag" else ""
            if word == "--set":
                hint = self._flag_set(args) or hint
            self.error(f"unknown {kind} {word}{hint}")
        return parsed, unknown

    def _check_switches(self, args: Sequence[str]) -> None:
        """An error for a flag that is on or off by its name, and that is given a word for it."""
        for argument, following in pairwise([*args, ""]):
            flag, equals, value = argument.partition("=")
            action = self._option_string_actions.get(flag)
            word = value if equals else following
            if isinstance(action, argparse.BooleanOptionalAction) and word in _SWITCHES:
                on, off = action.option_strings[:2]
                self.error(f"{flag} {word}: it takes no value; {on} turns it on, {off} off")

    def _hint(self, flag: str) -> str:
        """The flag that an unknown one stands for, maybe one of another engine if the command runs an engine."""
        elsewhere = name_elsewhere(flag, lambda name: options()[name].flag) if self.has_options else ""
        if elsewhere and all(word in self._option_string_actions for word in _FLAG.findall(elsewhere)):
            return elsewhere
        return did_you_mean(flag, self._option_string_actions)

    def _flag_set(self, args: Sequence[str]) -> str:
        """The flag that does here what `--set NAME=VALUE` does in `chat`."""
        names = re.findall(r"(?:^|\0)--set[\0=]([a-z_]+)=", "\0".join(args))
        flags = [flag for name in names if (flag := "--" + name.replace("_", "-")) in self._option_string_actions]
        return f"; did you mean {flags[0]}?" if flags else ""

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError that lists the choices for a missing argument, and names the help."""
        if message.startswith(_REQUIRED):
            positionals = [action for action in self._actions if not action.option_strings]
            known = ", ".join(str(choice) for action in positionals for choice in action.choices or ())
            message += f"; known: {known}" if known else ""
        raise UsageError(f"{message} (see {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        hint = did_you_mean(str(value), map(str, action.choices), listed_as="known")
        name = "/".join(action.option_strings) or str(action.metavar or action.dest).lower()
        self.error(f"unknown {name} {value!r}{hint}")


def exit_code_lines(*codes: ExitCode, meanings: dict[ExitCode, str] | None = None) -> str:
    """A line for each code in ascending order, with its meaning or the one given for this command."""
    own = meanings or {}
    lines = [f"  {code.value:<3} {own.get(code, code.meaning)}" for code in sorted({*codes, *own})]
    return "\n".join(["exit codes:", *lines])
