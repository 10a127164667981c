"""Grammars (llguidance's Lark) that allow only calls that follow their tools' schemas.

If the content has a structure of its own, that is a second grammar, `@content`.
"""

from __future__ import annotations

import json
from collections.abc import Set
from typing import Any

from eventlm.errors import InputError
from eventlm.text.grammar import RequestedGrammar, grammar_of_parts, invalid_grammar, lark_string
from eventlm.text.grammar_checker import GrammarChecker
from eventlm.text.tools.call_parser import CallSyntax
from eventlm.text.tools.definitions import FunctionDefinition, ToolUse
from eventlm.text.tools.formats import Formats, ReasoningState
from eventlm.text.tools.reasoning_budget import ReasoningBudget
from eventlm.text.tools.schema_check import without_annotations

_SPACE = r"[ \t\r\n]{0,32}"
#: Calls of one message, so that a model cannot go on for ever.
_MAX_CALLS = 128
#: As json.dumps and models write it. With free whitespace a model could go on for ever.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}


async def reply_grammar(
    use: ToolUse | None,
    formats: Formats,
    reasoning: ReasoningState,
    special_marks: Set[str],
    content: str,
    checker: GrammarChecker,
    budget: ReasoningBudget | None = None,
) -> str:
    """The grammar of a whole reply; empty if anything is allowed.

    content: the grammar of the content, empty if it has none. special_marks: the marks of the formats that are special
    tokens of the vocabulary, which no text matches. budget: of the reasoning. Raises InputError with the path of the
    part of a tool's schema that cannot be followed.
    """
    has_calls = use is not None and (use.is_constrained or bool(content))
    if not has_calls and (not content or reasoning == "closed"):
        return content if budget is None or reasoning == "closed" else budget.grammar(reasoning)

    def grammar(budget: ReasoningBudget | None) -> str:
        lark = reply_lark(use, formats, reasoning, special_marks, has_content=bool(content), budget=budget)
        parts: list[dict[str, Any]] = [{"lark_grammar": lark}]
        if content and (use is None or use.mode == "auto"):
            [part] = json.loads(content)["grammars"]
            parts.append(part | {"name": "content"})
        return grammar_of_parts(parts, "tools")

    try:
        requested = RequestedGrammar(grammar(None), "tools")
    except RecursionError as error:
        raise invalid_grammar("tools", "a schema is nested too deeply") from error
    try:
        checked = await checker.check(requested)
        # The checker does not know the vocabulary, whose tokens a budget counts.
        return checked if budget is None else grammar(budget)
    except InputError:
        # Check the schemas one by one to find the one at fault. If none is, they are too large together.
        for index in use.callable if use is not None else ():
            assert use is not None
            param = f"tools[{index}].function.parameters"
            schema = _schema(use.functions[index], is_free=False)
            await checker.check(RequestedGrammar(grammar_of_parts([{"json_schema": schema}], param), param))
        raise


def reply_lark(
    use: ToolUse | None,
    formats: Formats,
    reasoning: ReasoningState,
    special_marks: Set[str],
    *,
    has_content: bool = False,
    budget: ReasoningBudget | None = None,
) -> str:
    """The grammar as Lark."""
    first = ""
    if reasoning == "possible" and formats.reasoning is not None:
        # Text without reasoning must not look like reasoning.
        first = f" & ~/{_SPACE}{_regex(formats.reasoning.begin)}(.|\\n)*/"
    writer = _Writer(formats, special_marks)
    if use is None:
        start = "@content"
    elif use.mode != "auto":
        start = writer.forced(use)
    elif has_content:
        start = f"@content | {writer.forced(use)}"
    else:
        start = writer.triggered(first)
    return writer.grammar(writer.after_reasoning(start, reasoning, budget), use)


class _Writer:
    """Writes the rules of one grammar."""

    def __init__(self, formats: Formats, special_marks: Set[str]) -> None:
        self._formats = formats
        self._special = special_marks
        self._rules = [r"ANYTHING: /(.|\n)*/", f"SPACE: /{_SPACE}/"]

    @property
    def _syntax(self) -> CallSyntax:
        assert self._formats.tools is not None
        return self._formats.tools.syntax

    def forced(self, use: ToolUse) -> str:
        """A reply that is calls and nothing else."""
        self._call(self._syntax.layout[0])
        return "call" if use.one_call else self._calls()

    def triggered(self, first: str) -> str:
        """Any text in which each call that begins is a valid one. `first`: a condition on the start of the text."""
        if self._syntax.is_bare:
            self._call(self._syntax.layout[0])
            self._rules.append(rf"PLAIN: ANYTHING & ~/{_SPACE}\{{(.|\n)*/{first}")
            return f"PLAIN | SPACE {self._calls()}"
        begin = self._syntax.begin
        self._call(self._syntax.layout[0].removeprefix(begin))
        self._rules.append(f"FIRST: ANYTHING{first}")
        head, next_head = self._until("head", "FIRST", begin), self._until("next_head", "ANYTHING", begin)
        return f"FIRST | {head} call ({next_head} call)* ANYTHING"

    def after_reasoning(self, start: str, state: ReasoningState, budget: ReasoningBudget | None) -> str:
        """Free reasoning, within its budget, then the constrained reply."""
        format = self._formats.reasoning
        if format is None or state == "closed":
            return start
        self._rules.append(f"reply: {start}")
        if budget is None:
            inside = f"{self._until('thought', 'ANYTHING', format.end)} SPACE reply"
        else:
            self._rules += budget.rules()
            inside = "thinking SPACE reply"
        return inside if state == "open" else f"{self._text(format.begin)} {inside} | reply"

    def grammar(self, start: str, use: ToolUse | None) -> str:
        """All rules, with those of the functions."""
        rules = [f"start: {start}", *self._rules]
        if use is None:
            return "\n".join([*rules, ""])
        rules.append("function: " + " | ".join(f"function_{index}" for index in use.callable))
        for index in use.callable:
            function = use.functions[index]
            head = f'"{function.name}", "{self._syntax.arguments_key}": '
            rules.append(f"function_{index}: {lark_string(head)} arguments_{index}")
            schema = _schema(function, is_free=use.mode == "auto" and not function.strict)
            rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
        return "\n".join([*rules, ""])

    def _calls(self) -> str:
        return f"call ({self._text(self._syntax.separator)} call){{0,{_MAX_CALLS - 1}}}"

    def _call(self, before: str) -> None:
        opening, closing = before + '{"name": ', "}" + self._syntax.layout[1]
        self._rules.append(f"call: {self._text(opening)} function {self._text(closing)}")

    def _until(self, name: str, text: str, mark: str) -> str:
        """Text up to and including the first `mark`."""
        if mark in self._special:
            return f"{text} {mark}"
        self._rules.append(f"{name}[lazy]: {text} {lark_string(mark)}")
        return name

    def _text(self, text: str) -> str:
        """Lark for exactly this text, with marks that are special tokens by their names."""
        mark = next((mark for mark in sorted(self._special) if mark in text), "")
        if not mark:
            return lark_string(text) if text else ""
        before, _, after = text.partition(mark)
        return f"{self._text(before)} {mark} {self._text(after)}".strip()


def _regex(text: str) -> str:
    """A regular expression for exactly this text."""
    return "".join(character if character.isalnum() else f"\\x{ord(character):02x}" for character in text)


def _schema(function: FunctionDefinition, *, is_free: bool) -> dict[str, Any]:
    """The schema of a function's arguments, with llguidance's options; `is_free`: any object."""
    schema: dict[str, Any] = {"type": "object"}
    if not is_free:
        parameters = {"additionalProperties": False} if function.parameters is None else function.parameters
        # Descriptions can be long, and grammars have a largest size.
        schema |= without_annotations(parameters)
    # Keywords that a grammar cannot follow are an error only with `strict`.
    return schema | {"x-guidance": _LAYOUT | {"lenient": not function.strict}}
