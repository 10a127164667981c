"""Grammars of forced and strict calls: whatever a model draws under them is a message that keeps its promises."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import jsonschema
import pytest

from eventlm.errors import InputError
from eventlm.grammars import build_matcher, make_tokenizer
from eventlm.text.grammar import json_schema_grammar, regex_grammar
from eventlm.text.grammar_checker import GrammarChecker
from eventlm.text.tools.call_grammar import reply_grammar
from eventlm.text.tools.definitions import FunctionDefinition, ToolUse
from eventlm.text.tools.message import MessageDelta, MessageFormat
from tests.text.tools.cuttings import formats, parse_message

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>")
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"$ref": "#/$defs/Days"},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 14}},
}
PING: dict[str, Any] = {"type": "object", "additionalProperties": False}
FUNCTIONS = [FunctionDefinition("get_weather", None, WEATHER, True), FunctionDefinition("ping")]
SCHEMAS = {"get_weather": WEATHER, "ping": PING}


class Vocabulary(NamedTuple):
    """Bytes and the marks, which may be special tokens."""

    tokens: list[bytes]
    tokenizer: Any
    special: frozenset[str]


@cache
def vocabulary(*, marks_are_special: bool) -> Vocabulary:
    tokens = [bytes([byte]) for byte in range(256)] + [mark.encode() for mark in MARKS]
    special = dict(enumerate(tokens[256:], start=256)) if marks_are_special else {}
    return Vocabulary(tokens, make_tokenizer(tokens, special), frozenset(MARKS if marks_are_special else ()))


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker([mark.encode() for mark in MARKS])
    yield checker
    checker.close()


def draw_text(draw: random.Random, grammar: str, vocabulary: Vocabulary, *, max_tokens: int = 500) -> tuple[str, bool]:
    """What a model without any sense says, and whether it came to an end."""
    matcher = build_matcher(vocabulary.tokenizer, grammar)
    data = b""
    for _ in range(max_tokens):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token_id for token_id in range(len(vocabulary.tokens)) if mask >> token_id & 1]
        can_end = bool(mask >> len(vocabulary.tokens) & 1)
        if not allowed or (can_end and draw.random() < 0.05):
            return data.decode(errors="replace"), can_end
        marks = [token_id for token_id in allowed if token_id >= 256]
        letters = [token_id for token_id in allowed if 32 <= token_id < 127]
        token_id = draw.choice(marks if marks and draw.random() < 0.2 else letters or allowed)
        assert matcher.consume_token(token_id)
        data += vocabulary.tokens[token_id]
    return data.decode(errors="replace"), False


def check_calls(message: MessageDelta) -> None:
    for call in message.calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("marks_are_special", [False, True])
@pytest.mark.parametrize("tool_parser", ["hermes", "llama3_json"])
@pytest.mark.parametrize("reasoning", ["closed", "possible", "open"])
async def test_forced_calls(checker: GrammarChecker, tool_parser: str, reasoning: Any, marks_are_special: bool) -> None:
    found, words = formats(tool_parser, "qwen3"), vocabulary(marks_are_special=marks_are_special)
    num_ended = num_thoughts = 0
    for mode, is_parallel, callable in (("required", True, [0, 1]), ("required", False, [0, 1]), ("named", True, [0])):
        use = ToolUse([], FUNCTIONS, callable, mode, is_parallel)
        grammar = await reply_grammar(use, found, reasoning, words.special, "", checker)
        for number in range(4):
            text, has_ended = draw_text(random.Random(number), grammar, words)
            format = MessageFormat(tool_names=use.names, reasoning=reasoning)
            message, parser = parse_message(text, format, found)
            num_thoughts += bool(message.reasoning)
            if has_ended:
                num_ended += 1
                assert message.content == ""
                assert parser.calls_are_complete
                check_calls(message)
                assert len(message.calls) == 1 if use.one_call else message.calls
    assert num_ended >= 8
    assert bool(num_thoughts) == (reasoning != "closed") or reasoning == "possible"


@pytest.mark.parametrize("reasoning", ["closed", "open"])
async def test_strict_tools_in_free_text(checker: GrammarChecker, reasoning: Any) -> None:
    found, words = formats("hermes", "qwen3"), vocabulary(marks_are_special=True)
    use = ToolUse([], FUNCTIONS, [0, 1])
    grammar = await reply_grammar(use, found, reasoning, words.special, "", checker)
    num_calls = num_texts = 0
    for number in range(12):
        text, _ = draw_text(random.Random(number), grammar, words)
        message, parser = parse_message(text, MessageFormat(tool_names=use.names, reasoning=reasoning), found)
        if parser.calls_are_complete:
            for call in message.calls:
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name] if call.name != "ping" else {})
            num_calls += len(message.calls)
        num_texts += bool(message.content)
    assert num_calls > 10
    assert num_texts > 3


def test_text_is_free_and_what_looks_like_a_call_is_not() -> None:
    from tests.grammars import accepts

    found = formats("hermes", "none")
    grammar = json.dumps({"grammars": [{"lark_grammar": lark(ToolUse([], FUNCTIONS, [0, 1]), found)}]})
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern", "unit": "C"}}\n</tool_call>'
    assert accepts(grammar, "")
    assert accepts(grammar, "Any text, <tool_cal even.")
    assert accepts(grammar, f"So:\n{call} and {call}.")
    assert accepts(grammar, f"So:\n{call}\n<tool_call>\n" + '{"name": "ping", "arguments": {"x": [1]}}\n</tool_call>')
    assert not accepts(grammar, call.replace('"C"', '"K"'))
    assert not accepts(grammar, call.replace("get_weather", "other"))
    bare = json.dumps(
        {"grammars": [{"lark_grammar": lark(ToolUse([], FUNCTIONS, [0, 1]), formats("llama3_json", "none"))}]}
    )
    assert accepts(bare, "Any text")
    assert accepts(bare, '{"name": "ping", "parameters": {}}; {"name": "ping", "parameters": {"x": 1}}')
    assert not accepts(bare, '{"name": "get_weather", "parameters": {}}')


def lark(use: ToolUse, found: Any) -> str:
    from eventlm.text.tools.call_grammar import reply_lark

    return reply_lark(use, found, "closed", frozenset())


async def test_structured_content_beside_calls_and_reasoning(checker: GrammarChecker) -> None:
    from tests.grammars import accepts

    content = json_schema_grammar({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}, "p")
    found = formats("hermes", "qwen3")
    use = ToolUse([], FUNCTIONS, [0, 1])
    call = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    grammar = await reply_grammar(use, found, "closed", frozenset(), content, checker)
    assert accepts(grammar, '{"x": 1}')
    assert accepts(grammar, call)
    assert not accepts(grammar, "text")
    assert not accepts(grammar, '{"x": 1.5}')
    forced = await reply_grammar(
        ToolUse([], FUNCTIONS, [0, 1], "required"), found, "closed", frozenset(), content, checker
    )
    assert not accepts(forced, '{"x": 1}')
    assert accepts(forced, call)
    opened = await reply_grammar(None, found, "open", frozenset(), content, checker)
    assert accepts(opened, 'hm\n</think>\n\n{"x": 1}')
    assert not accepts(opened, '{"x": 1}')
    possible = await reply_grammar(None, found, "possible", frozenset(), content, checker)
    assert accepts(possible, '<think>hm</think>{"x": 1}')
    assert accepts(possible, '{"x": 1}')
    digits = await reply_grammar(None, found, "open", frozenset(), regex_grammar("[0-9]{3}", "p"), checker)
    assert accepts(digits, "hm</think>123")
    assert not accepts(digits, "hm</think>x")
    assert await reply_grammar(None, found, "closed", frozenset(), content, checker) == content
    assert await reply_grammar(None, found, "open", frozenset(), "", checker) == ""
    assert await reply_grammar(ToolUse([], FUNCTIONS[1:], [0]), found, "open", frozenset(), "", checker) == ""


@pytest.mark.parametrize(
    ("schema", "strict", "param"),
    [
        ({"properties": {"a": {"type": "array", "contains": {"type": "null"}}}}, True, "properties.a"),
        ({"properties": {"a": {"$ref": "#/$defs/Nowhere"}}}, False, "properties.a"),
        ({"properties": {"a": {"type": "integer", "minimum": 2, "maximum": 1}}, "required": ["a"]}, False,
         "properties.a"),
    ],
)  # fmt: skip
async def test_a_schema_that_cannot_be_followed(
    checker: GrammarChecker, schema: dict[str, Any], strict: bool, param: str
) -> None:
    functions = [FunctionDefinition("ok"), FunctionDefinition("f", None, schema, strict)]
    use = ToolUse([], functions, [0, 1], "required")
    with pytest.raises(InputError) as caught:
        await reply_grammar(use, formats("hermes"), "closed", frozenset(), "", checker)
    error = caught.value
    assert error.param is not None
    assert error.param.startswith("tools[1].function.parameters")
    assert error.param.endswith(param) or "properties" not in error.param
    assert error.param in str(error)


async def test_optional_parts_are_left_out(checker: GrammarChecker) -> None:
    """Formats and keywords that a grammar cannot follow do not keep tools from being called."""
    schema = {"properties": {"a": {"type": "integer", "format": "uint32"}, "b": {"uniqueItems": True}}}
    use = ToolUse([], [FunctionDefinition("f", None, schema)], [0], "required")
    assert await reply_grammar(use, formats("hermes"), "closed", frozenset(), "", checker)


async def test_schemas_that_are_too_large_together(checker: GrammarChecker) -> None:
    schema = {"properties": {f"property_{number}": {"type": "string"} for number in range(1000)}}
    functions = [FunctionDefinition(f"f{number}", None, schema) for number in range(8)]
    use = ToolUse([], functions, list(range(8)), "required")
    with pytest.raises(InputError, match="too large") as caught:
        await reply_grammar(use, formats("hermes"), "closed", frozenset(), "", checker)
    assert caught.value.param == "tools"
