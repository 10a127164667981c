"""Exit codes: one table, which every error's code is in."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import eventlm
from eventlm.errors import CheckpointError, EventLMError, ExitCode, PullError, UsageError

#: Where nearly all errors are; the others need a GPU's software.
_PACKAGES = tuple(f"eventlm.{name}." for name in ("bus", "client", "engine", "frontend", "metrics", "server"))


def all_errors(base: type[EventLMError] = EventLMError) -> Iterator[type[EventLMError]]:
    for error in base.__subclasses__():
        yield error
        yield from all_errors(error)


def test_every_error_has_a_code_of_the_table() -> None:
    for module in pkgutil.walk_packages(eventlm.__path__, "eventlm."):
        if module.name.startswith(_PACKAGES) and not module.ispkg:
            importlib.import_module(module.name)
    found = list(all_errors())
    assert len(found) > 15
    assert [error for error in found if error.exit_code not in list(ExitCode)] == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EventLMError("x"), ExitCode.FAILED),
        (UsageError("x"), ExitCode.USAGE),
        (CheckpointError("x"), ExitCode.USAGE),
        (CheckpointError("no memory", exit_code=ExitCode.FAILED), ExitCode.FAILED),
        (PullError("no network"), ExitCode.FAILED),
        (PullError("no such repository", exit_code=ExitCode.USAGE), ExitCode.USAGE),
    ],
)
def test_the_code_of_an_error(error: EventLMError, code: ExitCode) -> None:
    assert error.exit_code == code


def test_codes_are_unique_and_explained() -> None:
    assert len({code.value for code in ExitCode}) == len(ExitCode.__members__)
    assert all(code.meaning for code in ExitCode)
