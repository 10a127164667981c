"""What a scheduler may see of a request is written without its defaults and read back strictly."""

from __future__ import annotations

import msgspec
import pytest

from eventlm.scheduling_params import SchedulingParams


def test_defaults_are_left_out_and_come_back() -> None:
    assert msgspec.json.encode(SchedulingParams(model="m")) == b'{"model":"m"}'
    params = SchedulingParams(model="m", kind="score", priority=-3, deadline_ns=5, drop_if_late=True, front_end=2)
    assert msgspec.json.decode(msgspec.json.encode(params), type=SchedulingParams) == params


@pytest.mark.parametrize("text", ['{"model":"m","colour":1}', "{}", '{"model":"m","kind":"dance"}'])
def test_unknown_and_missing_fields_are_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=SchedulingParams)
