"""Grammars that cannot be built are refused before the arrival, with the part that is at fault."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from eventlm.errors import InputError
from eventlm.text.grammar import RequestedGrammar, json_schema_grammar, lark_grammar, regex_grammar
from eventlm.text.grammar_checker import GrammarChecker
from tests.server.conftest import INVALID, RunningServer, assert_error


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker([b"<|im_end|>"])
    yield checker
    checker.close()


def check(checker: GrammarChecker, grammar: str) -> str:
    return asyncio.run(checker.check(RequestedGrammar(grammar, "p")))


def fault(checker: GrammarChecker, grammar: str) -> tuple[str | None, str]:
    with pytest.raises(InputError) as caught:
        check(checker, grammar)
    body = caught.value
    assert body.code == "invalid_value"
    return body.param, str(body)


def of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string"}, "b": schema}, "required": ["b"]}


@pytest.mark.parametrize(
    ("schema", "param", "message"),
    [
        ({"type": "foo"}, "p", "Invalid type: foo"),
        (of({"type": "array", "uniqueItems": True}), "p.properties.b", "uniqueItems"),
        (of({"type": "array", "items": of({"not": {}})}), "p.properties.b.items.properties.b", "Unimplemented keys"),
        (of({"minLength": 5, "maxLength": 2, "type": "string"}), "p.properties.b", "minLength (5) is greater"),
        (of({"type": "string", "pattern": "(a"}), "p.properties.b", "unclosed group"),
        (of({"type": "string", "format": "nonsense"}), "p.properties.b", "Unknown format"),
        ({"anyOf": [{"type": "null"}, of({"if": {}})]}, "p.anyOf[1].properties.b", "Unimplemented keys"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"if": {}}}}, "p.$defs.x", "Unimplemented keys"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "p", "incompatible types"),
        ({"$ref": "#/$defs/x"}, "p", "$defs/x"),
        ({"$ref": "http://127.0.0.1:9/x"}, "p", "not present"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "p", "the same value; use anyOf."),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            "p.$defs.a",
            "match",
        ),
    ],
)
def test_a_schema_that_cannot_hold_is_refused_with_its_part(
    checker: GrammarChecker, schema: dict[str, Any], param: str, message: str
) -> None:
    found, text = fault(checker, json_schema_grammar(schema, "p"))
    assert found == param
    assert message in text


@pytest.mark.parametrize(
    ("regex", "message"),
    [
        ("(a", "unclosed group"),
        (r"(a)\1", "backreferences"),
        ("(?=a)b", "look-around"),
        (r"[^\s\S]", "nothing can match"),
        ("", "no text but the empty one"),
        ("(a{1000}){1000}", "too complex"),
        ("x{3,1}", "repetition"),
    ],
)
def test_a_bad_regex_is_refused(checker: GrammarChecker, regex: str, message: str) -> None:
    param, text = fault(checker, regex_grammar(regex, "p"))
    assert param == "p"
    assert message in text
    assert "\n<" not in text
    assert "start:" not in text


@pytest.mark.parametrize(
    "text", ["start: nope", 'x: "a"', "start: <|nope|>", "start: @x", 'start: %json {"type": "x"}']
)
def test_a_bad_grammar_is_refused(checker: GrammarChecker, text: str) -> None:
    assert fault(checker, lark_grammar(text, "p"))[0] == "p"


def test_special_tokens_of_the_model_may_be_named(checker: GrammarChecker) -> None:
    grammar = lark_grammar('start: "a" <|im_end|>', "p")
    assert check(checker, grammar) == grammar


def test_bad_structures_through_http(server: RunningServer) -> None:
    schema = of({"type": "array", "uniqueItems": True})
    path = "response_format.json_schema.schema.properties.b"
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert_error(server.chat(response_format=bad), 400, INVALID, path, "invalid_value", "uniqueItems")
    assert_error(server.chat(response_format=bad, stream=True), 400, INVALID, path, "invalid_value")
    wrong = server.complete(structured_outputs={"regex": "(a"})
    assert_error(wrong, 400, INVALID, "structured_outputs.regex", "invalid_value", "unclosed group")
    both = server.complete(guided_regex="a", guided_choice=["b"])
    assert_error(both, 400, INVALID, "guided_choice", "invalid_value", "guided_regex")
    assert not server.engine.requests


@pytest.mark.parametrize("schema", [True, {"type": "string", "pattern": "a+"}])
def test_a_bad_pattern_of_whitespace_is_not_the_schemas_fault(server: RunningServer, schema: Any) -> None:
    reply = server.chat(structured_outputs={"json": schema, "whitespace_pattern": "("})
    param = "structured_outputs.whitespace_pattern"
    assert_error(reply, 400, INVALID, param, "invalid_value", message="unclosed group")
    reply = server.chat(structured_outputs={"json": {"type": "string", "pattern": "("}, "whitespace_pattern": " "})
    assert_error(reply, 400, INVALID, "structured_outputs.json", "invalid_value", message="unclosed group")


def test_good_structures_reach_the_engine(server: RunningServer) -> None:
    assert server.chat(response_format={"type": "json_object"}).status == 200
    assert server.complete(prompt=["a", "b"], structured_outputs={"choice": ["x"]}).status == 200
    assert server.chat(response_format={"type": "text"}).status == 200
    grammars = [
        (bool(request.sampling.grammar), request.scheduling.waits_for_grammar) for request in server.engine.requests
    ]
    assert grammars == [(True, True)] * 3 + [(False, False)]
    assert server.engine.requests[1].sampling.grammar == server.engine.requests[2].sampling.grammar
