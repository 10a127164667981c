from __future__ import annotations

import pytest

from eventlm.errors import UsageError
from eventlm.tracebacks import describe, describe_exception

#: What an error says, and no description of it.
SECRET = "hunter" + "2"


def failing(secret: str) -> None:
    raise ValueError(secret)


def chained(secret: str, *, suppressed: bool = False) -> Exception:
    """An error whose cause is a ValueError."""
    try:
        try:
            failing(secret)
        except ValueError as cause:
            raise UsageError(secret) from (None if suppressed else cause)
    except UsageError as error:
        return error


def test_an_error_is_reduced_to_its_type_and_location() -> None:
    with pytest.raises(ValueError) as caught:
        failing(SECRET)
    lines = describe(caught.value).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError"
    assert any("in failing" in line for line in lines)
    assert SECRET not in "".join(lines)


def test_causes_come_first() -> None:
    lines = describe(chained(SECRET)).splitlines()
    assert lines.index("ValueError") < lines.index("which led to:") < lines.index("eventlm.errors.UsageError")
    assert SECRET not in "".join(lines)
    assert "which led to:" not in describe(chained("x", suppressed=True))


def test_an_error_without_a_traceback() -> None:
    assert describe(KeyError("hunter2")).splitlines() == ["Traceback (most recent call last):", "KeyError"]


@pytest.mark.parametrize("form", ["error", "tuple", "flag"])
def test_a_log_event_gets_the_description(form: str) -> None:
    try:
        failing(SECRET)
    except ValueError as caught:
        error = caught
        found = {"error": error, "tuple": (type(error), error, error.__traceback__), "flag": True}[form]
        event = describe_exception(None, "error", {"event": "it failed", "exc_info": found})
    assert event == {"event": "it failed", "exception": describe(error)}


def test_an_event_without_an_error_stays_as_it_is() -> None:
    assert describe_exception(None, "info", {"event": "fine"}) == {"event": "fine"}
    assert describe_exception(None, "info", {"event": "fine", "exc_info": False}) == {"event": "fine"}
    assert describe_exception(None, "info", {"event": "fine", "exc_info": True}) == {"event": "fine"}


def test_of_asyncios_words_only_the_first_are_kept() -> None:
    event = {"event": "Exception in callback Handle.run(secret='hunter2')", "exc_info": KeyError(), "logger": "asyncio"}
    assert describe_exception(None, "error", event)["event"] == "Exception in callback Handle"
