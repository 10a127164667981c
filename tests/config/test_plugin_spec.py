from __future__ import annotations

import pytest

from eventlm.config.plugin_spec import format_plugin_spec, parse_plugin_spec
from eventlm.errors import UsageError


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("fcfs", {"type": "fcfs"}),
        ("edf:multiplier=2,min_deadline_ms=300", {"type": "edf", "multiplier": 2, "min_deadline_ms": 300}),
        (
            "a:x=1.5,y=-3,z=1e-3,t=true,f=false",
            {"type": "a", "x": 1.5, "y": -3, "z": 0.001, "t": True, "f": False},
        ),
        ("a:x=word,y=a=b,z=a:b", {"type": "a", "x": "word", "y": "a=b", "z": "a:b"}),
        ("my.module:Class", {"type": "my.module:Class"}),
        ("my.module:Class:x=1", {"type": "my.module:Class", "x": 1}),
        (" edf : multiplier = 2 ", {"type": "edf", "multiplier": 2}),
        ("a:x=99999999999999999999999", {"type": "a", "x": "99999999999999999999999"}),
        ("a:x=nan,y=inf,z=True", {"type": "a", "x": "nan", "y": "inf", "z": "True"}),
    ],
)
def test_a_spec_is_a_name_and_typed_parameters(text: str, spec: dict[str, object]) -> None:
    parsed = parse_plugin_spec(text)
    assert parsed == spec
    assert [type(value) for value in parsed.values()] == [type(value) for value in spec.values()]
    assert parse_plugin_spec(format_plugin_spec(spec)) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no plug-in"),
        (":x=1", "names no plug-in"),
        ("x=1", "names no plug-in"),
        ("edf:", "ends in a colon"),
        ("edf:x=1,", "'' is not of the form PARAMETER=VALUE"),
        ("edf:x=1,y", "'y' is not of the form PARAMETER=VALUE"),
        ("edf:x=", "'x=' is not of the form PARAMETER=VALUE"),
        ("edf:2x=1", "'2x=1' is not of the form PARAMETER=VALUE"),
        ("edf:x=1,x=2", "gives x twice"),
        ("edf:type=lrs", "`type` is no parameter"),
    ],
)
def test_a_spec_that_makes_no_sense_is_quoted(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_plugin_spec(text)
    assert repr(text) in str(caught.value)
    assert message in str(caught.value)
