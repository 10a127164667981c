"""What a request says of its output's structure, and what is wrong with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eventlm.errors import InputError
from eventlm.grammars import GrammarThreads
from eventlm.text.decoding import convert_request
from eventlm.text.grammar import (
    MAX_CHOICES,
    choice_grammar,
    compiled_schema,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
    requested_grammar,
    text_grammar,
)
from eventlm.text.protocol import ChatCompletionRequest
from tests.grammars import accepts

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GBNF = 'root ::= "yes" | "no" number\nnumber ::= [0-9]+'


def asked(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return convert_request(body, ChatCompletionRequest, {})


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, ['{"a": [1, null]}', "{}"], ["[]", '"x"', "1", "{a}"]),
        ({"response_format": json_schema(PERSON)}, ['{"name": "Ä", "age": 3}'], ["{}", '{"age":3,"name":"x"}']),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "object", "maxProperties": 0}}},
            ["{}"],
            ["[]"],
        ),
        ({"structured_outputs": {"json": PERSON}}, ['{"name":"","age":-1}'], ['{"name": 1, "age": 1}']),
        ({"structured_outputs": {"json": json.dumps(PERSON)}}, ['{"name":"","age":-1}'], ["{}"]),
        ({"structured_outputs": {"json": True}}, ["[]", '"x"', "null"], ["x"]),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, ['{"a":1}'], ['{"a": 1}']),
        ({"structured_outputs": {"json": True, "whitespace_pattern": " "}}, ["[1, 2]"], ["[1,  2]", "[1,\n2]"]),
        ({"structured_outputs": {"regex": r"[a-z]{2}\d/?"}}, ["ab1", "ab1/"], ["a1", "ab", "ab1//"]),
        ({"structured_outputs": {"regex": r"\d[\d.]"}}, ["12", "1."], ["٣٣", "1٣"]),
        ({"structured_outputs": {"regex": r"[^\d][]\d]\\d\["}}, ["a1\\d["], ["٣1\\d[", "1]\\d["]),
        ({"structured_outputs": {"regex": r"\S\W[^\s][^\w][\S\d]"}}, ["a!b-c"], ["a²b-c", "a!\x1c-c", "\x1c!b-c"]),
        ({"structured_outputs": {"regex": r"\w+"}}, ["größe_1"], ["a b", "a\u0301"]),
        ({"structured_outputs": {"regex": "^ab+$"}}, ["abb"], ["a", "xab"]),
        (
            {"structured_outputs": {"choice": ['"a"', "é\n", "a/b\\c", "<|x|>"]}},
            ['"a"', "é\n", "a/b\\c", "<|x|>"],
            ["a"],
        ),
        ({"structured_outputs": {"grammar": 'start: "a" b+\nb: /[0-9]/'}}, ["a1", "a12"], ["a", "1"]),
        ({"structured_outputs": {"grammar": GBNF}}, ["yes", "no12"], ["no", "yes1"]),
        ({"guided_json": PERSON}, ['{"name":"","age":-1}'], ["{}"]),
        ({"guided_regex": "x|y"}, ["x", "y"], ["xy"]),
        ({"guided_choice": ["yes", "no"]}, ["yes"], ["maybe", "ye"]),
        ({"guided_grammar": GBNF}, ["no1"], ["no"]),
    ],
)
def test_a_grammar_accepts_what_was_asked_for(fields: dict[str, Any], good: list[str], bad: list[str]) -> None:
    requested = requested_grammar(asked(**fields))
    assert requested.param.startswith(next(iter(fields)))
    assert [text for text in good if not accepts(requested.grammar, text)] == []
    assert [text for text in bad if accepts(requested.grammar, text)] == []


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
def test_text_is_no_structure(fields: dict[str, Any]) -> None:
    assert requested_grammar(asked(**fields)) == ("", "")


def test_whitespace_between_the_tokens_of_json_is_bounded() -> None:
    grammar = json_schema_grammar({"type": "object"}, "x")
    assert accepts(grammar, "{" + " " * 32 + "}")
    assert not accepts(grammar, "{" + " " * 33 + "}")


def test_a_schema_can_be_part_of_a_lark_grammar() -> None:
    schema = json.dumps(compiled_schema(PERSON, "x"))
    grammar = lark_grammar(f'start: "<call>" args "</call>"\nargs: %json {schema}', "x")
    assert accepts(grammar, '<call>{"name": "f", "age": 1}</call>')
    assert not accepts(grammar, "<call>{}</call>")


def test_a_clients_options_of_the_library_do_not_hold() -> None:
    schema = {"x-guidance": {"lenient": True, "whitespace_pattern": "x"}, "type": "array", "items": {"type": "integer"}}
    assert accepts(json_schema_grammar(schema, "p"), "[1, 2]")
    assert not accepts(json_schema_grammar(schema, "p"), "[1,x2]")


BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
    ({"response_format": "json"}, "response_format", "invalid_type"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "missing_required_parameter",
    ),
    ({"response_format": json_schema([])}, "response_format.json_schema.schema", "invalid_type"),
    ({"response_format": json_schema(False)}, "response_format.json_schema.schema", "invalid_value"),
    ({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "invalid_type"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "invalid_value"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "invalid_type"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "invalid_value"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]", "invalid_value"),
    ({"structured_outputs": {"choice": ["a"] * (MAX_CHOICES + 1)}}, "structured_outputs.choice", "invalid_value"),
    (
        {"response_format": {"type": "text", "json_schema": {"schema": True}}},
        "response_format.json_schema",
        "invalid_value",
    ),
    (
        {"response_format": {"type": "json_object", "json_schema": {"schema": True}}},
        "response_format.json_schema",
        "invalid_value",
    ),
    ({"response_format": {**json_schema(True), "schema": True}}, "response_format.schema", "invalid_value"),
    (
        {"structured_outputs": {"json": True, "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
        "invalid_value",
    ),
    (
        {"structured_outputs": {"json": True, "disable_any_whitespace": True, "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "invalid_value",
    ),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "invalid_value",
    ),
    (
        {"structured_outputs": {"choice": ["a"], "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
        "invalid_value",
    ),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "invalid_value"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar", "invalid_value"),
    ({"guided_grammar": "root ::= " + "(" * 5000}, "guided_grammar", "invalid_value"),
    ({"guided_regex": "a" * 131073}, "guided_regex", "invalid_value"),
    ({"guided_json": {"const": "a" * 131073}}, "guided_json", "invalid_value"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD)
def test_an_error_says_which_part_is_wrong(fields: dict[str, Any], param: str | None, code: str) -> None:
    with pytest.raises(InputError) as caught:
        requested_grammar(asked(**fields))
    body = caught.value
    assert (body.param, body.code) == (param, code)


def test_two_structures_are_one_too_many_but_text_is_none() -> None:
    assert requested_grammar(asked(response_format={"type": "text"}, guided_choice=["a"])).param == "guided_choice"
    with pytest.raises(InputError, match="'response_format' asks for one already"):
        requested_grammar(asked(response_format={"type": "json_object"}, guided_choice=["a"]))


def test_lone_surrogates_are_escaped_or_refused() -> None:
    with pytest.raises(InputError, match="surrogate"):
        regex_grammar("\ud800", "x")
    for grammar in (choice_grammar(["\ud800"], "x"), text_grammar('start: "\ud800"', "x")):
        grammar.encode()


def test_threads_for_grammars_are_deep_enough_for_the_longest_chain() -> None:
    """In a thread of ordinary size this ends the process."""
    length = 9_000
    rules = "\n".join(f"a{index:x}: a{index + 1:x}" for index in range(length))
    threads = GrammarThreads(1)
    assert threads.submit(accepts, lark_grammar(f'start: a0\n{rules}\na{length:x}: "x"', "x"), "x").result()
    threads.shutdown()
